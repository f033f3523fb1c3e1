"""The scripts that every test of the algorithms goes through, in one place."""
import importlib

SCRIPTS = ["grpo", "dapo", "dr_grpo", "grpo2", "gdpo", "gopo", "gspo", "cispo", "sapo"]


def load(name: str):
    """The script as a module, from the repository's root."""
    return importlib.import_module(name)
