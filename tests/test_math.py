"""The three functions of every script, against hand-computed values and against the identities
that the papers imply. Ids such as C5 name the kind of fault that a test keeps out."""
import inspect
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import SCRIPTS, load

import common

TOKEN_MEAN = {"dapo", "gopo", "cispo"}
CONSTANT = {"dr_grpo"}
OWN_GROUP_ONLY = [name for name in SCRIPTS if name != "gdpo"]  # gdpo normalises over the batch too
CLIPPED = [name for name in SCRIPTS if name not in ("gspo", "cispo", "sapo")]  # token by token

every_script = pytest.mark.parametrize("name", SCRIPTS)
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)
fp32 = st.floats(-100, 100, width=32)


def options(name, **changes):
    return replace(load(name).Args(), **changes)


def advantages(name, groups, dtype=torch.float32, **changes):
    """Of plain numbers, [prompts][group]: one reward part of weight 1."""
    rewards = torch.tensor(groups, dtype=dtype)[..., None]
    return load(name).advantages(rewards, options(name, reward_weights=(1.0,), **changes))


def advantages_of_parts(name, groups, weights, **changes):
    """Of [prompts][group][parts]."""
    return load(name).advantages(torch.tensor(groups, dtype=torch.float32),
                                 options(name, reward_weights=weights, **changes))


def same(values, expected, tolerance=1e-5):
    torch.testing.assert_close(values, torch.tensor(expected, dtype=values.dtype), rtol=0,
                               atol=tolerance)


# -------------------------------------------------------------------- advantages
@every_script
def test_the_three_functions_have_the_same_signatures(name):
    """C17: no advantage can depend on lengths, because none gets to see them."""
    script = load(name)
    for function in ("advantages", "token_weights", "token_loss"):
        assert (inspect.signature(getattr(script, function))
                == inspect.signature(getattr(load("grpo"), function)))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo"])
def test_grpo_by_hand(name):
    """(r − mean)/(std + 1e-4) with the n − 1 std: DeepSeekMath, section 4.1.2."""
    same(advantages(name, [[1, 0]]), [[.70701, -.70701]])
    same(advantages(name, [[1, 0, 0, 1]]), [[.86588, -.86588, -.86588, .86588]])
    same(advantages(name, [[1, 0, 0, 0]]), [[.75 / .5001] + 3 * [-.25 / .5001]])


def test_dapo_weights_make_the_papers_rewards():
    """Weights 2 and 1 are ±1 and the length punishment, but for a shift that no A can see."""
    parts = [[[1, 0], [0, 0], [1, -.5], [0, -1]]]
    expected = advantages("dapo", [[1, -1, .5, -2]])
    torch.testing.assert_close(advantages_of_parts("dapo", parts, options("dapo").reward_weights),
                               expected)


def test_dr_grpo_by_hand():
    """r − mean, arXiv 2503.20783."""
    same(advantages("dr_grpo", [[1, 0, 0, 0], [2, 4, 4, 2]]),
         [[.75, -.25, -.25, -.25], [-1, 1, 1, -1]])


def test_gopo_by_hand():
    """Ranks −s … s, arXiv 2602.03876; ties share their mean rank."""
    same(advantages("gopo", [[.1, 7, .3, -5]]), [[-2 / 3, 2, 2 / 3, -2]])
    same(advantages("gopo", [[1, 0, 0, 1]]), [[4 / 3, -4 / 3, -4 / 3, 4 / 3]])
    same(advantages("gopo", [[0, 1, 1, 5]]), [[-2, 0, 0, 2]])
    same(advantages("gopo", [[.1, 7, .3]], rank_scale=1.0), [[-1, 1, 0]])


def test_gdpo_by_hand():
    """C16, C18: eq. 4 to 6 of arXiv 2601.05242, n − 1 std. Two groups of two, weights 1 and 0.5.

    Before the batch step the parts (0,0),(1,1) give ∓(1 + .5)·.7071 = ∓1.0607 and (1,0),(0,1) give
    ±(1 − .5)·.7071 = ±.3536: a constant sum, and yet a group to learn from. The batch step divides
    by sqrt(2 (1.0607² + .3536²) / 3) = .9129.
    """
    groups = [[[0, 0], [1, 1]], [[1, 0], [0, 1]]]
    adv = advantages_of_parts("gdpo", groups, (1.0, 0.5))
    same(adv, [[-1.1619, 1.1619], [.3873, -.3873]], 3e-4)
    std = math.sqrt(2 * (1.06066**2 + .35355**2) / 3)
    same(adv * std, [[-1.0607, 1.0607], [.354, -.354]], 1e-3)
    equal = advantages_of_parts("gdpo", groups, (1.0, 1.0)) * math.sqrt(2 * 1.41421**2 / 3)
    same(equal, [[-1.4142, 1.4142], [0, 0]], 1e-3)


@pytest.mark.parametrize("name", OWN_GROUP_ONLY)
def test_a_constant_sum_teaches_the_others_nothing(name):
    """C18, the other side: where rewards are summed, parts that cancel carry no signal."""
    assert (advantages_of_parts(name, [[[1, 0], [0, 1]]], (1.0, 1.0)) == 0).all()


def test_gdpo_scale_of_a_reward_does_not_matter():
    """Parts are normalised on their own: only the weights set the balance."""
    parts = torch.tensor([[[1., 0], [0, 1], [0, 1]], [[0, 1], [1, 1], [1, 0]]])
    args = options("gdpo", reward_weights=(1.0, 0.5))
    torch.testing.assert_close(load("gdpo").advantages(parts, args),
                               load("gdpo").advantages(parts * torch.tensor([1, 50.]), args),
                               rtol=0, atol=1e-3)


def test_gdpo_one_part_constant():
    """A part that does not vary in a group adds nothing to it, and takes nothing away."""
    parts = [[[1, 1], [0, 1], [0, 1]], [[1, 0], [0, 0], [1, 0]]]
    torch.testing.assert_close(advantages_of_parts("gdpo", parts, (1.0, 0.5)),
                               advantages("gdpo", [[1, 0, 0], [1, 0, 1]]))
    # In fp32, r − mean of seven times 12.3 isn't 0, and std + 1e-4 would scale it up.
    def beside(value):
        varied, other = [[i % 3, value] for i in range(7)], [[i % 2, i % 4] for i in range(7)]
        return advantages_of_parts("gdpo", [varied, other], (1.0, 0.5))

    assert all(torch.equal(beside(value), beside(0)) for value in (.1, .7, 12.3))


def test_gdpo_with_one_reward_is_grpo_divided_by_the_batch_std():
    groups = [[1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    grpo = advantages("grpo", groups)
    torch.testing.assert_close(advantages("gdpo", groups), grpo / (grpo.std() + 1e-4))


def test_gdpo_conditioned_reward():
    """The second part pays only where the first reaches the threshold."""
    parts = [[[1, 1], [1, 0], [0, 1], [0, 0]]]
    conditioned = [[[1, 1], [1, 0], [0, 0], [0, 0]]]
    torch.testing.assert_close(advantages_of_parts("gdpo", parts, (1.0, 0.5), conditioned=1.0),
                               advantages_of_parts("gdpo", conditioned, (1.0, 0.5)))
    assert (advantages_of_parts("gdpo", [[[0, 1], [0, 0]]], (1.0, 0.5), conditioned=1.0) == 0).all()


@quickly
@given(better=fp32, worse=fp32)
def test_grpo2_is_exactly_one(better, worse):
    """A pair says which is better and no more: ±1 for any gap, arXiv 2510.00977."""
    sign = float((better > worse) - (better < worse))
    assert advantages("grpo2", [[better, worse]]).tolist() == [[sign, -sign]]


def test_grpo2_is_grpo_times_root_two():
    """A group of two, n − 1 → n: factor √2."""
    groups = [[1, 0], [0, 5], [2, 2]]
    torch.testing.assert_close(advantages("grpo2", groups),
                               advantages("grpo", groups) * math.sqrt(2), rtol=2e-4, atol=0)


@every_script
@pytest.mark.parametrize("group", [2, 3, 8, 16])
def test_groups_without_signal_are_exactly_zero(name, group):
    """C1, C2: decided by max == min. In fp32 the std of a constant group is not 0."""
    @quickly
    @given(values=st.lists(st.floats(-2.0**100, 2.0**100, width=32), min_size=1, max_size=4))
    def check(values):
        adv = advantages(name, [[value] * group for value in values])
        assert (adv == 0).all()

    check()


@every_script
def test_a_group_without_signal_stays_zero_beside_others(name):
    """C1, C14: also next to a group that has some, and with parts that are constant alone."""
    adv = advantages(name, [[.1] * 3, [1, 0, 0], [.7] * 3])
    assert (adv[[0, 2]] == 0).all() and (adv[1] != 0).all()
    assert (advantages(name, [[1, 1], [0, 0]]) == 0).all()
    assert (advantages(name, [[2, 2], [5, 5]]) == 0).all()
    parts = [[[.3, .7]] * 3, [[.3, 1], [.3, 0], [.3, 1]]]
    adv = advantages_of_parts(name, parts, (1.0, 0.5))
    assert (adv[0] == 0).all() and (adv[1] != 0).all()


@every_script
def test_advantages_sum_to_zero(name):
    """Per group; GDPO's over the batch."""
    @quickly
    @given(st.lists(st.lists(fp32, min_size=4, max_size=4), min_size=1, max_size=3))
    def check(groups):
        adv = advantages(name, groups)
        assert adv.isfinite().all()
        sums = adv.sum() if name == "gdpo" else adv.sum(1)
        assert (sums.abs() < 1e-4).all()

    check()


@every_script
def test_better_is_never_worse(name):
    """Ties get equal advantages, and more reward never a smaller one."""
    adv = advantages(name, [[3, 1, 2, 1, 3, 0]])[0]
    assert adv[1] == adv[3] and adv[0] == adv[4]
    assert adv[5] < adv[1] < adv[2] < adv[0]


@every_script
def test_groups_of_two(name):
    first, second = advantages(name, [[1, 0]])[0].tolist()
    assert first > 0 and second == pytest.approx(-first)


@pytest.mark.parametrize("name", OWN_GROUP_ONLY)
def test_other_groups_do_not_matter(name):
    """C14, C15: a group keeps its numbers whatever else is in the batch."""
    alone = advantages(name, [[1, 0, 0, 0]])
    for other in ([1, 1, 1, 1], [100, -100, 3, 4]):
        assert torch.equal(advantages(name, [[1, 0, 0, 0], other])[:1], alone)


def leave_one_out(groups):
    """RLOO: each reward minus the mean of the others."""
    total = groups.sum(1, keepdim=True)
    return groups - (total - groups) / (groups.shape[1] - 1)


def test_dr_grpo_and_gopo_against_leave_one_out():
    """dr_grpo = (G − 1)/G · RLOO; gopo on right and wrong = s · RLOO."""
    groups = torch.tensor(list(itertools.product([0., 1], repeat=4)))  # all that can happen
    rloo = leave_one_out(groups)
    torch.testing.assert_close(advantages("dr_grpo", groups.tolist()), rloo * 3 / 4)
    for scale in (1.0, 2.0):
        torch.testing.assert_close(advantages("gopo", groups.tolist(), rank_scale=scale),
                                   scale * rloo)


@quickly
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_gopo_sees_order_alone(group):
    """Unchanged by every strictly increasing transform; exp, in float64."""
    transformed = [math.exp(value) for value in group]
    if len(set(transformed)) == len(set(group)):  # exp of neighbours can round to one number
        assert torch.equal(advantages("gopo", [group], torch.float64),
                           advantages("gopo", [transformed], torch.float64))


def test_grpo_sees_more_than_order():
    group = [0., 1, 5]
    transformed = [math.exp(value) for value in group]
    assert not torch.allclose(advantages("grpo", [group]), advantages("grpo", [transformed]),
                              atol=.05)


@every_script
def test_one_weight_per_part(name):
    with pytest.raises(ValueError):
        advantages_of_parts(name, [[[1, 0], [0, 1]]], (1.0,))


# -------------------------------------------------------------------- token weights
def mask_of(lengths, width=None):
    return (torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]).float()


def average(name, losses, mask, num_sequences, num_tokens, **changes):
    weights = load(name).token_weights(mask, num_sequences, num_tokens, options(name, **changes))
    assert weights.shape == mask.shape
    return (weights * losses).sum().item()


@every_script
@pytest.mark.parametrize("width", [6, 8, 64])
def test_mean_of_means_trap(name, width):
    """C5, C6: losses +1 on 2 tokens and −1 on 6, in every split and any padding."""
    lengths, limit = [2, 6], 10
    mask = mask_of(lengths, width)
    losses = torch.tensor([[1.0], [-1.0]]).expand_as(mask)
    expected = -4 / 8 if name in TOKEN_MEAN else -4 / (2 * limit) if name in CONSTANT else 0.0
    for split in ([[0, 1]], [[0], [1]], [[1], [0]]):
        parts = [average(name, losses[rows], mask[rows], 2, 8, max_completion_tokens=limit)
                 for rows in split]
        assert sum(parts) == pytest.approx(expected, abs=1e-7)


@every_script
def test_token_weights_by_hand(name):
    mask = mask_of([2, 4])
    args = options(name, max_completion_tokens=10)
    weights = load(name).token_weights(mask, 2, 6, args)
    short, long = ((1 / 6, 1 / 6) if name in TOKEN_MEAN else (1 / 20, 1 / 20) if name in CONSTANT
                   else (1 / 4, 1 / 8))
    same(weights, [[short, short, 0, 0], [long, long, long, long]])


@every_script
def test_what_is_masked_counts_as_a_sequence_and_has_no_tokens(name):
    """An empty or masked completion weighs nothing, divides nothing by 0, and is one of N."""
    mask = torch.cat([mask_of([3]), torch.zeros(1, 3)])
    weights = load(name).token_weights(mask, 2, 3, options(name, max_completion_tokens=3))
    assert weights.isfinite().all() and (weights[1] == 0).all()
    same(weights[0].sum(), 1.0 if name in TOKEN_MEAN else 0.5)


@every_script
def test_useless_groups_count_in_the_denominator(name):
    """C25, our choice: beside as many useless sequences the useful weigh half of what they do
    alone. (DAPO never has any, because it samples until the batch is full.)"""
    mask = mask_of([4, 4])
    alone = load(name).token_weights(mask, 2, 8, options(name))
    beside = load(name).token_weights(mask, 4, 16, options(name))
    torch.testing.assert_close(beside, alone / 2)


# -------------------------------------------------------------------- token loss
def token_loss(name, ratios, adv, **changes):
    """Of one sequence of tokens with these ratios, and its gradient with respect to log π."""
    old = torch.linspace(-2, -1, len(ratios))[None]
    logp = (old + torch.tensor(ratios).log()).requires_grad_()
    mask = torch.ones_like(old)
    loss = load(name).token_loss(logp, old, torch.tensor([float(adv)]), mask,
                                 options(name, **changes))
    return loss.detach()[0], torch.autograd.grad(loss.sum(), logp)[0][0]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_loss_by_hand(name):
    """C24: one ratio for each token, −min(ρA, clip(ρ)A), DeepSeekMath eq. 3; with clip-higher where
    the script's default says so."""
    high = 1.28 if name in ("dapo", "grpo2") else 1.2
    loss, gradient = token_loss(name, [1.5, 0.5, 1.1, 0.9], 2)
    same(loss, [-2 * high, -1.0, -2.2, -1.8])
    same(gradient, [0, -1.0, -2.2, -1.8])
    loss, gradient = token_loss(name, [1.5, 0.5, 1.1, 0.9], -2)
    same(loss, [3.0, 1.6, 2.2, 1.8])
    same(gradient, [3.0, 0, 2.2, 1.8])
    same(token_loss(name, [1.5, 0.5], 1, clip_low=.1, clip_high=.3)[0], [-1.3, -0.5])
    same(token_loss(name, [1.5, 0.5], -1, clip_low=.1, clip_high=.3)[0], [1.5, 0.9])


def test_gspo_by_hand():
    """Eq. 5 and 7 of arXiv 2507.18071: one ratio for a sequence, the geometric mean of its tokens'.
    Ratios 4, 1/2, 1/2, 2 have the product 2, so s = 2^(1/4) = 1.1892; each token's share of its
    gradient is s·A/4, and there is none when s is clipped, whatever the token's own ratio is."""
    ratios, s = [4, .5, .5, 2], 2 ** .25
    for adv in (1, -1):
        loss, gradient = token_loss("gspo", ratios, adv, clip_low=.2, clip_high=.2)
        same(loss, [-s * adv] * 4)
        same(gradient, [-s * adv] * 4)  # of the sum over 4 tokens, hence without the 1/4
    loss, gradient = token_loss("gspo", ratios, 1, clip_low=.2, clip_high=.1)
    same(loss, [-1.1] * 4)
    same(gradient, [0.0] * 4)
    loss, gradient = token_loss("gspo", [1 / ratio for ratio in ratios], -1, clip_low=.1)
    same(loss, [.9] * 4)
    same(gradient, [0.0] * 4)


def test_gspo_bounds():
    """3e-4 and 4e-4: a mean log-ratio of 3.5e-4 is in, one of 4.5e-4 out; below likewise."""
    def has_gradient(log_ratio, adv):
        return bool(token_loss("gspo", [math.exp(log_ratio)] * 3, adv)[1].any())

    assert options("gspo").clip_low == 3e-4 and options("gspo").clip_high == 4e-4
    assert has_gradient(3.5e-4, 1) and not has_gradient(4.5e-4, 1) and has_gradient(4.5e-4, -1)
    assert has_gradient(-2.5e-4, -1) and not has_gradient(-3.5e-4, -1) and has_gradient(-3.5e-4, 1)


def test_gspo_ratio_is_of_the_mask():
    """Padding and masked sequences: no part of the mean, and never divided by 0."""
    mask = mask_of([2, 4])
    mask = torch.cat([mask, torch.zeros(1, 4)])
    old = torch.full((3, 4), -1.0)
    logp = (old + torch.tensor([1.2, 1.2, 9, 9]).log()).requires_grad_()
    loss = load("gspo").token_loss(logp, old, torch.ones(3), mask, options("gspo", clip_high=9.0))
    same(loss[:, 0], [-1.2, -(1.2 * 9) ** .5, -1.0])
    gradient, = torch.autograd.grad((mask * loss).sum(), logp)
    assert ((gradient != 0) == (mask != 0)).all()


def test_cispo_by_hand():
    """−sg(min(ρ, 5)) A log π, arXiv 2506.13585 with the cap of arXiv 2510.13786: for either sign of
    A every token has a gradient, that of REINFORCE times a weight of at most 5."""
    ratios, weights = [.01, .5, 1, 4, 5, 6, 1000], [.01, .5, 1, 4, 5, 5, 5]
    old = torch.linspace(-2, -1, 7)
    for adv in (2, -2):
        loss, gradient = token_loss("cispo", ratios, adv)
        same(gradient, [-adv * weight for weight in weights], 1e-4)
        torch.testing.assert_close(loss, gradient * (old + torch.tensor(ratios).log()))
    same(token_loss("cispo", [.5, 2], 1, clip_high=.5)[1], [-.5, -1.5])
    same(token_loss("cispo", [.5, 2], 1, clip_low=.2)[1], [-.8, -2])  # the paper's lower bound


def test_sapo_by_hand():
    """A · 4/τ · σ(τ(ρ − 1)), arXiv 2511.20347. At ρ = 1 the value is 2A/τ and the gradient A; at
    ρ = 2 σ' has fallen from 1/4 to σ(τ)(1 − σ(τ)), which is .19661 at τ = 1."""
    loss, gradient = token_loss("sapo", [1, 2], 1)
    same(loss, [-2.0, -4 * .731059])
    same(gradient, [-1.0, -4 * .196612 * 2])
    loss, gradient = token_loss("sapo", [1, 2], -1)
    same(loss, [2 / 1.05, 4 / 1.05 * .740775])  # σ(1.05)
    same(gradient, [1.0, 4 * .740775 * .259225 * 2])
    same(token_loss("sapo", [2], -1, tau_neg=1.0)[1], [4 * .196612 * 2])
    same(token_loss("sapo", [2], 1, tau_pos=2.0)[1], [-4 * .880797 * .119203 * 2])


def test_sapo_at_ratio_one_is_grpo():
    for adv in (1.5, -1.5, 0.0):
        torch.testing.assert_close(token_loss("sapo", [1.0], adv)[1],
                                   token_loss("grpo", [1.0], adv)[1])


def test_sapo_gate_fades_on_both_sides():
    """The gradient over ρ, which is 1 at ρ = 1, falls as ρ leaves 1 either way, and never to 0 at
    once; faster for A < 0, and whatever clip_low and clip_high say."""
    ratios = torch.tensor([1, 1.2, 1.5, 2, 3, 5])
    other = 2 - ratios[:4].clamp(max=1.9)  # as far below 1
    for sign in (1, -1):
        gate = -token_loss("sapo", ratios.tolist(), sign)[1] / ratios * sign
        assert gate[0] == pytest.approx(1) and (gate.diff() < 0).all() and (gate > 0).all()
        below = -token_loss("sapo", other.tolist(), sign)[1] / other * sign
        assert (below.diff() < 0).all()
        torch.testing.assert_close(below[:3], gate[:3])
    up, down = (token_loss("sapo", [.5, 2, 4], sign)[1] for sign in (1, -1))
    assert (down.abs() < up.abs()).all()
    assert torch.equal(up, token_loss("sapo", [.5, 2, 4], 1, clip_low=0, clip_high=0)[1])


def test_dapo_clip_higher():
    """Ratio 1.25 is clipped at 0.2, not at 0.28; the lower bound stays 0.2."""
    assert options("dapo").clip_low == 0.2 and options("dapo").clip_high == 0.28
    assert token_loss("dapo", [1.25], 1)[1].item() == pytest.approx(-1.25)
    assert token_loss("dapo", [1.25], 1, clip_high=0.2)[1].item() == 0


@every_script
@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("gap", [12.0, -12.0, 100.0, -100.0])
def test_large_log_gaps_stay_finite(name, adv, gap):
    """C11: exp() is bounded, so neither loss nor gradient overflows."""
    old = torch.full((1, 3), -1.0)
    logp = (old + gap).requires_grad_()
    loss = load(name).token_loss(logp, old, torch.tensor([adv]), torch.ones_like(old),
                                 options(name))
    gradient = torch.autograd.grad(loss.sum(), logp)[0]
    assert loss.isfinite().all() and gradient.isfinite().all()
    if gap == 12 and adv < 0:
        value = {"cispo": 5 * 11.0, "sapo": 4 / 1.05}.get(name, math.exp(12))  # cispo: log π = 11
        torch.testing.assert_close(loss, torch.full_like(loss, value))
    if name == "cispo" and adv:
        assert (gradient != 0).all()


@every_script
def test_at_ratio_one_it_is_reinforce(name):
    """C2: the gradient of a token is −A times its weight, though the loss of a group of equal
    lengths is 0 (not so for SAPO, whose value at ρ = 1 is −2A/τ)."""
    mask = mask_of([3, 3])
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    args = options(name, reward_weights=(1.0,))
    adv = load(name).advantages(torch.tensor([[[1.0], [0.0]]]), args)[0]
    weights = load(name).token_weights(mask, 2, 6, args)
    loss = (weights * load(name).token_loss(logp, logp.detach(), adv, mask, args)).sum()
    gradient = torch.autograd.grad(loss, logp)[0]
    assert (name == "sapo" or abs(loss.item()) < 1e-6) and (gradient != 0).all()
    torch.testing.assert_close(gradient, -adv[:, None] * weights)


@every_script
def test_clip_share_is_counted_by_the_sign_of_the_advantage(name):
    """C10: ratio 1.5 is clipped-high only where A > 0, 0.5 clipped-low only where A < 0; padding
    and A = 0 never. GSPO clips whole sequences, of ratio (1.5 · 1.5 · 0.5)^(1/3) = 1.04 here, or
    1/1.04 in the last two; CISPO and SAPO leave every token some gradient."""
    run = common.Run(options(name), ["correct"], "x.py")
    run.start_step()
    old = torch.zeros(5, 4)
    logp = torch.tensor([1.5, 1.5, 0.5, 1.5]).log().expand(5, 4) * torch.tensor(
        [[1.0], [1.0], [1.0], [-1.0], [-1.0]])
    micro = SimpleNamespace(old_logp=old, adv=torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0]),
                            mask=mask_of([3, 3, 3, 3, 3], 4))
    run.add_clipped(load(name).token_loss, logp, micro, options(name))
    high, low = {"gspo": (3, 3), "cispo": (0, 0), "sapo": (0, 0)}.get(name, (2 + 1, 1 + 2))
    extreme = pytest.approx(math.log(2))  # ratios from 0.5 to 2
    assert run.sums == {"clipped_high": high, "clipped_low": low, "log_ratio_max": extreme,
                        "minus_log_ratio_min": extreme}


def test_dapo_with_equal_lengths_is_grpo():
    """Without shaping, filtering and clip-higher: the two differ in how tokens are averaged."""
    mask = mask_of([5, 5, 5, 5])
    torch.manual_seed(0)
    logp, old = torch.randn(2, 4, 5)
    losses = []
    for name in ("grpo", "dapo"):
        script, args = load(name), options(name, clip_high=0.2, reward_weights=(1.0,))
        adv = script.advantages(torch.tensor([[[1.0], [0], [0], [1]]]), args)[0]
        losses.append((script.token_weights(mask, 4, 20, args)
                       * script.token_loss(logp, old, adv, mask, args)).sum())
    torch.testing.assert_close(*losses)


# -------------------------------------------------------------------- DAPO's own
def test_overlong_punishment():
    """C21: eq. 13, a zone of 4 tokens before a limit of 20; off: untouched."""
    def punish(length, cache=4):
        return load("dapo").overlong_punishment(
            length, options("dapo", max_completion_tokens=20, overlong_cache=cache))

    assert [punish(length) for length in (0, 1, 16, 17, 18, 19, 20)] == [
        0, 0, 0, -.25, -.5, -.75, -1]
    assert punish(25) == -1
    assert [punish(length, cache=0) for length in (0, 16, 20)] == [0, 0, 0]
    assert [punish(length, cache=20) for length in (0, 10, 20)] == [0, -.5, -1]


@pytest.mark.parametrize("cache", [-1, 97])
def test_overlong_cache_must_fit(cache, monkeypatch):
    """C21: a zone wider than the limit would punish everything; refused before anything starts."""
    monkeypatch.setattr(common, "start", lambda *args, **options: pytest.fail("not refused"))
    with pytest.raises(common.RunError, match="--overlong-cache"):
        load("dapo").main(options("dapo", overlong_cache=cache, max_completion_tokens=96))


def test_repeated_finds_all_but_the_first():
    """By token ids: texts that only look alike are different samples."""
    group = [common.Sample([1], ids, [0.0] * len(ids)) for ids in (
        [5, 6], [5], [5, 6], [6, 5], [5], [5, 6])]
    assert load("dapo").repeated(group) == [2, 4, 5]
    assert load("dapo").repeated(group[:2]) == []
