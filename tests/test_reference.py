"""The in-process reference against the mixle package's CausalLM: every position, every gradient, and every refusal."""

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mixle.models.transformer import build_causal_lm
from torch import Tensor

from torchtitan_mixle import reference
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.model.model import CausalAttention, CausalLM
from torchtitan_mixle.model.weights import to_mixle, wqkv_to_qkv
from torchtitan_mixle.planning.check import validate_tp_pp_cp_plan
from torchtitan_mixle.reference import (
    ColumnParallelLinear,
    PPStage,
    RowParallelLinear,
    TPAttentionShard,
    TPCausalLMShard,
    cp_attention_forward,
    cp_forward_causal_lm,
    cp_shard_sequence,
    pipeline_forward,
    pp_partition_causal_lm,
    tp_attention_forward,
    tp_forward_causal_lm,
    tp_shard_attention,
    tp_shard_causal_lm,
)

BATCH, SEQ_LEN, VOCAB = 5, 12, 29
SHAPE = {"d_model": 24, "n_layer": 5, "n_head": 6, "block": 16}
TP, PP, CP = (1, 2, 3, 6), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 12)
LONG = 30.0  # seconds: what a test waits for before it fails, never how long it takes

# Copied from the documentation of the module; "self" and the types are left out.
SIGNATURES = {
    "ColumnParallelLinear": "(weight, bias)",
    "ColumnParallelLinear.forward": "(x)",
    "PPStage": "(blocks, *, tok=None, pos=None, ln=None, head=None)",
    "PPStage.forward": "(x)",
    "RowParallelLinear": "(weight, bias)",
    "RowParallelLinear.forward": "(x_shards)",
    "TPAttentionShard": "(n_head_local, qkv_weight, qkv_bias, proj_weight, proj_bias)",
    "TPBlockShard": "(attn, mlp_fc1, mlp_fc2)",
    "TPCausalLMShard": "(blocks, tp_size)",
    "cp_attention_forward": "(attn, chunks)",
    "cp_forward_causal_lm": "(model, x, cp_size)",
    "cp_shard_sequence": "(x, cp_size)",
    "pipeline_forward": "(stages, x, n_microbatches)",
    "pp_partition_causal_lm": "(model, pp_size)",
    "tp_attention_forward": "(x, shards)",
    "tp_forward_causal_lm": "(model, x, tp_shard)",
    "tp_shard_attention": "(attn, tp_size)",
    "tp_shard_causal_lm": "(model, tp_size)",
    "validate_tp_pp_cp_plan": "(model, tp_size=1, pp_size=1, cp_size=1)",
}


def mixle_model(*, mup: bool = False, dtype: torch.dtype = torch.float32, **shape: int) -> Any:
    torch.manual_seed(0)
    model = build_causal_lm(VOCAB, **SHAPE | shape).to(dtype)
    with torch.no_grad():  # spread everything: a forgotten bias or norm must show
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
        if mup:
            model.mup_output_multiplier.fill_(0.37)
            for block in model.blocks:
                block.attn.mup_attention = True
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread_an_operation() -> Iterator[None]:
    """The stages' threads are enough for the cores; tensors of this size only lose by being split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain() -> Any:
    return mixle_model()


def some_ids(batch: int = BATCH, seq_len: int = SEQ_LEN) -> Tensor:
    return torch.randint(VOCAB, (batch, seq_len), generator=torch.Generator().manual_seed(batch * seq_len))


def dense(model: Any, ids: Tensor) -> Tensor:
    return model(ids, return_all_logits=True)


def tp_forward(model: Any, ids: Tensor, tp: int) -> Tensor:
    return tp_forward_causal_lm(model, ids, tp_shard_causal_lm(model, tp))


def pp_forward(model: Any, ids: Tensor, pp: int, n_microbatches: int) -> Tensor:
    return pipeline_forward(pp_partition_causal_lm(model, pp), ids, n_microbatches)


# ---- Names


def without_types(signature: inspect.Signature) -> str:
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(inspect.Signature(parameters))


def test_the_documented_names_and_signatures() -> None:
    def look_up(name: str) -> Any:
        return inspect.getattr_static(reference, name) if "." not in name else getattr(*split(name))

    def split(name: str) -> tuple[Any, str]:
        owner, attribute = name.split(".")
        return getattr(reference, owner), attribute

    assert {name: without_types(inspect.signature(look_up(name))) for name in SIGNATURES} == SIGNATURES
    assert set(reference.__all__) == {name for name in SIGNATURES if "." not in name}
    assert reference.validate_tp_pp_cp_plan is validate_tp_pp_cp_plan


@pytest.mark.parametrize("name", ["TPAttentionShard", "TPBlockShard", "TPCausalLMShard", "ColumnParallelLinear"])
def test_fields_follow_the_signature(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(getattr(reference, name)) if field.init]
    assert f"({', '.join(fields)})" == SIGNATURES[name]


# ---- Against mixle's model


@dataclasses.dataclass
class Case:
    """A mixle model and what it computes."""

    model: Any
    ids: Tensor
    coefficients: Tensor
    tolerance: float
    logits: Tensor
    gradients: list[Tensor]

    def check(self, forward: Callable[..., Tensor], *sizes: int) -> None:
        logits = forward(self.model, self.ids, *sizes)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad((logits * self.coefficients).sum(), parameters)
        close = {"atol": self.tolerance, "rtol": self.tolerance}
        torch.testing.assert_close(logits, self.logits, **close)
        for name, gradient, wanted in zip(names, gradients, self.gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module", params=["fp32", "fp64", "fp32-mup", "fp64-mup"])
def case(request: pytest.FixtureRequest) -> Case:
    dtype, tolerance = (torch.float64, 1e-10) if request.param.startswith("fp64") else (torch.float32, 1e-5)
    model, ids = mixle_model(mup=request.param.endswith("mup"), dtype=dtype), some_ids()
    coefficients = torch.randn(BATCH, SEQ_LEN, VOCAB, dtype=dtype) / (BATCH * SEQ_LEN)
    logits = dense(model, ids)
    gradients = torch.autograd.grad((logits * coefficients).sum(), list(model.parameters()))
    return Case(model, ids, coefficients, tolerance, logits.detach(), list(gradients))


@pytest.mark.parametrize("tp", TP)
def test_tensor_parallel(case: Case, tp: int) -> None:
    case.check(tp_forward, tp)


@pytest.mark.parametrize("pp", PP)
def test_pipeline(case: Case, pp: int) -> None:
    for n_microbatches in range(1, BATCH + 1):
        case.check(pp_forward, pp, n_microbatches)


@pytest.mark.parametrize("cp", CP)
def test_context_parallel(case: Case, cp: int) -> None:
    case.check(cp_forward_causal_lm, cp)


def test_attention_alone(case: Case) -> None:
    attn = case.model.blocks[0].attn
    x = torch.randn(2, SEQ_LEN, SHAPE["d_model"], dtype=case.logits.dtype)
    for output in (
        *(tp_attention_forward(x, tp_shard_attention(attn, tp)) for tp in TP),
        *(torch.cat(cp_attention_forward(attn, cp_shard_sequence(x, cp)), dim=1) for cp in CP),
    ):
        torch.testing.assert_close(output, attn(x), atol=case.tolerance, rtol=case.tolerance)


def test_the_mup_flags_change_the_numbers() -> None:
    """Or the cases above would prove nothing about them."""
    attention = tp_shard_attention(mixle_model(mup=True).blocks[0].attn, 2)
    x = torch.randn(1, SEQ_LEN, SHAPE["d_model"])
    scaled = tp_attention_forward(x, attention)
    for shard in attention:
        shard.mup_attention = False
    assert (tp_attention_forward(x, attention) - scaled).abs().max() > 1e-3


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 7),
    seq_len=st.integers(1, SHAPE["block"]),
    pp=st.sampled_from(PP),
    tp=st.sampled_from(TP),
    data=st.data(),
)
def test_any_batch_and_length(plain: Any, batch: int, seq_len: int, pp: int, tp: int, data: st.DataObject) -> None:
    n_microbatches = data.draw(st.integers(1, batch))
    cp = data.draw(st.sampled_from([n for n in range(1, seq_len + 1) if seq_len % n == 0]))
    ids = some_ids(batch, seq_len)
    with torch.no_grad():
        expected = dense(plain, ids)
        for logits in (
            tp_forward(plain, ids, tp),
            pp_forward(plain, ids, pp, n_microbatches),
            cp_forward_causal_lm(plain, ids, cp),
        ):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_ids_may_be_floats_as_in_mixle(plain: Any) -> None:
    ids = some_ids()
    expected = dense(plain, ids.float())
    for logits in (
        tp_forward(plain, ids.float(), 2),
        pp_forward(plain, ids.float(), 2, 2),
        cp_forward_causal_lm(plain, ids.float(), 2),
    ):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_any_object_with_the_attributes(plain: Any) -> None:
    duck = SimpleNamespace(
        tok=plain.tok, pos=plain.pos, blocks=list(plain.blocks), ln=plain.ln, head=plain.head
    )  # no mup_output_multiplier: logits as they are
    ids = some_ids()
    for logits in (tp_forward(duck, ids, 3), pp_forward(duck, ids, 3, 2), cp_forward_causal_lm(duck, ids, 3)):
        torch.testing.assert_close(logits, dense(plain, ids), atol=1e-5, rtol=1e-5)


# ---- Shards


@settings(max_examples=30, deadline=None)
@given(shares=st.lists(st.integers(1, 4), min_size=1, max_size=4), other=st.integers(1, 5), with_bias=st.booleans())
def test_parallel_linears_of_any_shares(shares: list[int], other: int, with_bias: bool) -> None:
    dense = torch.nn.Linear(other, sum(shares), bias=with_bias)
    x = torch.randn(2, 3, other)
    bias = None if dense.bias is None else list(dense.bias.split(shares))
    column = ColumnParallelLinear(list(dense.weight.split(shares)), bias)
    torch.testing.assert_close(column.forward(x), dense(x))

    dense = torch.nn.Linear(sum(shares), other, bias=with_bias)
    x = torch.randn(2, 3, sum(shares))
    row = RowParallelLinear(list(dense.weight.split(shares, dim=1)), dense.bias)
    torch.testing.assert_close(row.forward(list(x.split(shares, dim=-1))), dense(x))


@pytest.mark.parametrize("tp", TP)
def test_each_rank_has_its_heads_rows_of_q_and_of_k_and_of_v(tp: int) -> None:
    attn = mixle_model().blocks[0].attn
    q, k, v = attn.qkv.weight.chunk(3)
    share = SHAPE["d_model"] // tp
    shards = tp_shard_attention(attn, tp)
    assert len(shards) == tp
    for rank, shard in enumerate(shards):
        own = slice(rank * share, (rank + 1) * share)
        assert shard.n_head_local == SHAPE["n_head"] // tp
        assert torch.equal(shard.qkv_weight, torch.cat([q[own], k[own], v[own]]))
        assert torch.equal(shard.proj_weight, attn.proj.weight[:, own])
        assert (shard.proj_bias is not None) == (rank == 0)


def test_attention_without_biases() -> None:
    attn = mixle_model().blocks[0].attn
    attn.qkv.bias = attn.proj.bias = None
    x = torch.randn(1, SEQ_LEN, SHAPE["d_model"])
    torch.testing.assert_close(tp_attention_forward(x, tp_shard_attention(attn, 3)), attn(x))


def test_sharding_again_after_an_update_follows_it() -> None:
    model, ids = mixle_model(), some_ids()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        tp_forward(model, ids, 2).logsumexp(-1).mean().backward()
        optimizer.step()
    torch.testing.assert_close(tp_forward(model, ids, 2), dense(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pp", PP)
def test_stages_are_contiguous_and_the_first_take_the_rest(plain: Any, pp: int) -> None:
    stages = pp_partition_causal_lm(plain, pp)
    n_layer = SHAPE["n_layer"]
    assert [len(stage.blocks) for stage in stages] == [n_layer // pp + (rank < n_layer % pp) for rank in range(pp)]
    assert [block for stage in stages for block in stage.blocks] == list(plain.blocks)
    assert [stage.tok is not None for stage in stages] == [rank == 0 for rank in range(pp)]
    assert [stage.head is not None for stage in stages] == [rank == pp - 1 for rank in range(pp)]
    owned = {id(p) for stage in stages for p in stage.parameters()}
    assert owned == {id(p) for p in plain.parameters()}


@given(cp=st.integers(1, 5), length=st.integers(1, 5), trailing=st.lists(st.integers(1, 3), max_size=2))
def test_chunks_are_the_sequence_in_order(cp: int, length: int, trailing: list[int]) -> None:
    x = torch.randn(2, cp * length, *trailing)
    chunks = cp_shard_sequence(x, cp)
    assert [chunk.shape[1] for chunk in chunks] == [length] * cp
    assert torch.equal(torch.cat(chunks, dim=1), x)


# ---- Against our own model


@pytest.mark.parametrize("mup", [False, True])
@pytest.mark.parametrize("tp", TP)
def test_our_attention_equals_the_reference(tp: int, mup: bool) -> None:
    torch.manual_seed(1)
    d, n_head = SHAPE["d_model"], SHAPE["n_head"]
    ours = CausalAttention(CausalLMArgs(vocab_size=VOCAB, **SHAPE, mup_attention=mup))
    theirs = mixle_model(mup=mup).blocks[0].attn
    theirs.load_state_dict(
        {
            "qkv.weight": wqkv_to_qkv(ours.wqkv.weight, n_head),
            "qkv.bias": wqkv_to_qkv(ours.wqkv.bias, n_head),
            "proj.weight": ours.proj.weight,
            "proj.bias": ours.proj.bias,
        }
    )
    x, direction = torch.randn(2, 2, SEQ_LEN, d)
    expected = tp_attention_forward(x, tp_shard_attention(theirs, tp))
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)

    for output in (ours(x), expected):
        (output * direction).sum().backward()
    gradient = wqkv_to_qkv(ours.wqkv.weight.grad, n_head)
    torch.testing.assert_close(gradient, theirs.qkv.weight.grad, atol=1e-5, rtol=1e-5)


def test_our_weights_in_mixle_layout() -> None:
    ours = CausalLM(CausalLMArgs(vocab_size=VOCAB, **SHAPE))
    ours.init_weights()
    model = mixle_model()
    model.load_state_dict(to_mixle(ours.state_dict(), SHAPE["n_head"]))
    ids = some_ids()
    for logits in (tp_forward(model, ids, 6), pp_forward(model, ids, 2, 3), cp_forward_causal_lm(model, ids, 4)):
        torch.testing.assert_close(logits, ours(ids), atol=1e-5, rtol=1e-5)


# ---- The pipeline's threads


@pytest.fixture
def no_new_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Hooked(PPStage):
    """A stage without blocks that calls `hook` with the number of the microbatch, then returns its input."""

    def __init__(self, hook: Callable[[int], object] = lambda microbatch: None) -> None:
        super().__init__([])
        self.hook, self.calls = hook, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hook(self.calls - 1)
        return x + 0  # a new tensor, so that autograd sees the stage


@pytest.mark.parametrize("n_stages", [2, 3, 5])
@pytest.mark.usefixtures("no_new_threads")
def test_microbatches_are_in_flight_at_the_same_time(n_stages: int) -> None:
    """Stage s may only go on with microbatch n-1-s once every other stage is inside a microbatch of its own."""
    all_inside = threading.Barrier(n_stages)

    def meet_at(n: int) -> Callable[[int], object]:
        return lambda microbatch: all_inside.wait(LONG) if microbatch == n else None

    stages = [Hooked(meet_at(n_stages - 1 - s)) for s in range(n_stages)]
    x = torch.arange(2 * n_stages)
    assert torch.equal(pipeline_forward(stages, x, n_stages), x)


@pytest.mark.usefixtures("no_new_threads")
def test_the_driver_does_not_wait_for_the_first_microbatch() -> None:
    """The last stage holds microbatch 0 until the first one has finished with all of them."""
    fed = threading.Event()
    first = Hooked(lambda microbatch: fed.set() if microbatch == 63 else None)
    last = Hooked(lambda microbatch: fed.wait(LONG) or pytest.fail("microbatches were held back"))
    x = torch.arange(64)
    assert torch.equal(pipeline_forward([first, Hooked(), last], x, 64), x)


class Broken(Exception):
    """Nothing else raises this."""


@pytest.mark.parametrize("kind", [Broken, KeyError, SystemExit])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 199])
@pytest.mark.usefixtures("no_new_threads")
def test_an_exception_in_a_stage_reaches_the_caller(position: int, at: int, kind: type[BaseException]) -> None:
    error = kind("in a stage")

    def fail(microbatch: int) -> None:
        if microbatch == at:
            raise error

    stages = [Hooked(fail if i == position else lambda microbatch: None) for i in range(3)]
    with pytest.raises(kind) as caught:
        pipeline_forward(stages, torch.arange(200), 200)
    assert caught.value is error
    assert stages[position].calls == at + 1


@pytest.mark.usefixtures("no_new_threads")
def test_the_first_microbatch_that_failed_is_the_one_reported() -> None:
    """Stage 1 fails with microbatch 0 only after stage 0 has failed with microbatch 1."""
    failed = threading.Event()

    def early(microbatch: int) -> None:
        if microbatch == 1:
            failed.set()
            raise KeyError("stage 0")

    def late(microbatch: int) -> None:
        assert failed.wait(LONG)
        raise Broken("stage 1")

    with pytest.raises(Broken, match="stage 1"):
        pipeline_forward([Hooked(early), Hooked(late)], torch.arange(8), 8)


@pytest.mark.usefixtures("no_new_threads")
def test_after_a_failure_no_stage_begins_another_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 is inside microbatch 1 until the caller, who knows of the failure, waits for the threads."""
    given_up = threading.Event()
    join = threading.Thread.join

    def announced_join(thread: threading.Thread, timeout: float | None = None) -> None:
        given_up.set()
        join(thread, timeout)

    def fail(microbatch: int) -> None:
        raise Broken

    monkeypatch.setattr(threading.Thread, "join", announced_join)
    first = Hooked(lambda microbatch: given_up.wait(LONG) if microbatch == 1 else None)
    with pytest.raises(Broken):
        pipeline_forward([first, Hooked(fail)], torch.arange(50), 50)
    assert first.calls <= 2  # one, if the failure was known before stage 0 took up microbatch 1


@pytest.mark.usefixtures("no_new_threads")
def test_no_thread_is_left_when_the_caller_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(KeyboardInterrupt):
        pipeline_forward([Hooked() for _ in range(4)], torch.arange(50), 50)
    assert len(started) == 2


@pytest.mark.usefixtures("no_new_threads")
def test_stages_compute_in_the_callers_modes() -> None:
    seen: list[tuple[Any, ...]] = []

    def modes() -> tuple[Any, ...]:
        dtype = F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), dtype

    stages = [Hooked(lambda microbatch: seen.append(modes()))] * 2
    for context in (
        torch.enable_grad(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        seen.clear()
        with context:
            pipeline_forward(stages, torch.ones(2), 2)
            assert seen == [modes()] * 4


def test_no_graph_is_kept_without_gradients(plain: Any) -> None:
    with torch.no_grad():
        assert not pp_forward(plain, some_ids(), 2, 2).requires_grad
    assert pp_forward(plain, some_ids(), 2, 2).requires_grad


# ---- Misuse


X = torch.ones(2, SEQ_LEN, SHAPE["d_model"])


def shards_of(plain: Any, tp: int) -> list[TPAttentionShard]:
    return tp_shard_attention(plain.blocks[0].attn, tp)


def changed(shard: TPAttentionShard, **values: Any) -> TPAttentionShard:
    return dataclasses.replace(shard, **values)


MISUSE: dict[str, tuple[Callable[[Any], object], str]] = {
    "tp-heads": (lambda m: tp_shard_attention(m.blocks[0].attn, 4), "tp_size=4 must divide n_head=6.*1, 2, 3 or 6"),
    "tp-zero": (lambda m: tp_shard_causal_lm(m, 0), "tp_size=0 must divide n_head=6"),
    "tp-hidden": (
        lambda m: tp_shard_causal_lm(SimpleNamespace(blocks=[odd_hidden()]), 2),
        "tp_size=2 must divide the 33 units of the MLP; use one of 1, 3, 11, 33",
    ),
    "tp-rank-missing": (
        lambda m: tp_attention_forward(X, shards_of(m, 3)[:2]),
        r"shape \(2, 12, 24\).*\(2, \(24, 24\), \(24, 8\), True, False\), .*make up the width.*pass all shards",
    ),
    "tp-rank-added": (
        lambda m: tp_attention_forward(X, shards_of(m, 6)[:1] + shards_of(m, 6)[2:]),
        "make up the width",
    ),
    "tp-order": (lambda m: tp_attention_forward(X, shards_of(m, 2)[::-1]), "proj_bias on rank 0 alone"),
    "tp-twice": (lambda m: tp_attention_forward(X, shards_of(m, 2)[:1] * 2), "proj_bias on rank 0 alone"),
    "tp-none": (lambda m: tp_attention_forward(X, []), r"mup_attention\) \[\]: must be"),
    "tp-mixed": (lambda m: tp_attention_forward(X, shards_of(m, 2)[:1] + shards_of(m, 3)[1:2]), "whole heads"),
    "tp-part-of-a-head": (
        lambda m: tp_attention_forward(X, [changed(s, n_head_local=5) for s in shards_of(m, 2)]),
        "whole heads",
    ),
    "tp-no-heads": (
        lambda m: tp_attention_forward(X, [changed(s, n_head_local=0) for s in shards_of(m, 2)]),
        r"\[\(0, \(36, 24\)",
    ),
    "tp-mup-differs": (lambda m: tp_attention_forward(X, one_with_mup(shards_of(m, 2))), r"False, True\)\]: must be"),
    "tp-width": (lambda m: tp_attention_forward(X[..., :12], shards_of(m, 2)), r"shape \(2, 12, 12\)"),
    "tp-no-batch": (
        lambda m: tp_attention_forward(X[0], shards_of(m, 2)),
        r"shape \(12, 24\).*\(batch, sequence, width",
    ),
    "tp-other-depth": (
        lambda m: tp_forward_causal_lm(m, some_ids(), tp_shard_causal_lm(mixle_model(n_layer=2), 2)),
        r"tp_shard has 2 blocks.*must be the model's 5 and tp_size=2; use tp_shard_causal_lm\(model, 2\)",
    ),
    "tp-other-size": (
        lambda m: tp_forward_causal_lm(m, some_ids(), TPCausalLMShard(tp_shard_causal_lm(m, 2).blocks, 3)),
        r"shared between \[2\] ranks.*tp_size=3",
    ),
    "tp-empty": (lambda m: tp_forward_causal_lm(m, some_ids(), TPCausalLMShard([], 2)), "tp_shard has 0 blocks"),
    "column-empty": (lambda m: ColumnParallelLinear([], None), r"in_features=\[\].*one shard or more"),
    "column-differ": (lambda m: ColumnParallelLinear([torch.ones(1, 2), torch.ones(1, 3)], None), r"=\[2, 3\]"),
    "column-bias": (lambda m: ColumnParallelLinear([torch.ones(1, 2)] * 2, [torch.ones(1)]), r"\[1\].*\[1, 1\] rows"),
    "column-input": (lambda m: ColumnParallelLinear([torch.ones(1, 2)], None).forward(torch.ones(3)), "must be 2"),
    "row-empty": (lambda m: RowParallelLinear([], None), r"out_features=\[\]"),
    "row-bias": (lambda m: RowParallelLinear([torch.ones(3, 2)], torch.ones(2)), "2 numbers.*out_features=3"),
    "row-count": (
        lambda m: RowParallelLinear([torch.ones(3, 2)] * 2, None).forward([torch.ones(2)]),
        r"widths \[2\].*take \[2, 2\].*2 shards",
    ),
    "row-width": (lambda m: RowParallelLinear([torch.ones(3, 2)], None).forward([torch.ones(4)]), r"\[4\].*\[2\]"),
    "pp-many": (lambda m: pp_partition_causal_lm(m, 6), "pp_size=6.*5 blocks; use 1 to 5"),
    "pp-zero": (lambda m: pp_partition_causal_lm(m, 0), "pp_size=0"),
    "pp-half-embedding": (lambda m: PPStage([], tok=m.tok), "tok and pos"),
    "pp-half-readout": (lambda m: PPStage([], head=m.head), "ln and head"),
    "pp-no-stages": (lambda m: pipeline_forward([], some_ids(), 1), "no stages"),
    "pp-microbatches-zero": (lambda m: pp_forward(m, some_ids(), 2, 0), "n_microbatches=0.*use 1 to 5"),
    "pp-microbatches-many": (lambda m: pp_forward(m, some_ids(), 2, 6), "n_microbatches=6.*use 1 to 5"),
    "pp-scalar": (lambda m: pipeline_forward([Hooked()], torch.tensor(1), 1), "batch of 0 that x holds"),
    "pp-long": (lambda m: pp_forward(m, some_ids(seq_len=17), 2, 1), "T=17 positions.*16 rows"),
    "cp-uneven": (lambda m: cp_shard_sequence(some_ids(), 5), "cp_size=5.*T=12.*one of 1, 2, 3, 4, 6, 12"),
    "cp-zero": (lambda m: cp_forward_causal_lm(m, some_ids(), 0), "cp_size=0"),
    "cp-flat": (lambda m: cp_shard_sequence(torch.ones(4), 2), r"shape \(4,\)"),
    "cp-no-sequence": (lambda m: cp_shard_sequence(torch.ones(4, 0), 1), "sequence not empty"),
    "cp-long": (lambda m: cp_forward_causal_lm(m, some_ids(seq_len=20), 2), "T=20 positions.*16 rows"),
    "cp-no-chunks": (lambda m: cp_attention_forward(m.blocks[0].attn, []), r"shapes \[\]"),
    "cp-chunks-differ": (
        lambda m: cp_attention_forward(m.blocks[0].attn, [X[:, :8], X[:, 8:]]),
        r"\(2, 8, 24\), \(2, 4, 24\).*cp_shard_sequence",
    ),
    "cp-width": (lambda m: cp_attention_forward(m.blocks[0].attn, [X[..., :8]]), "last dimension must be 24"),
    "ids-long": (lambda m: tp_forward(m, some_ids(seq_len=17), 2), "T=17 positions.*16 rows"),
    "ids-empty": (lambda m: tp_forward(m, some_ids()[:0], 2), r"shape \(0, 12\)"),
    "ids-flat": (lambda m: tp_forward(m, some_ids()[0], 2), r"shape \(12,\)"),
    "ids-vocabulary": (lambda m: tp_forward(m, some_ids() + 1, 2), "to 29: token ids.*from 0 to 28"),
    "ids-negative": (lambda m: cp_forward_causal_lm(m, -some_ids(), 2), "values from -"),
    "ids-fraction": (lambda m: tp_forward(m, some_ids() + 0.5, 2), "whole numbers"),
    "our-model": (lambda m: tp_shard_causal_lm(our_model(), 2), "CausalLM is not in mixle's layout.*to_mixle"),
    "our-model-pp": (lambda m: pp_partition_causal_lm(our_model(), 2), "ModuleDict"),
    "our-attention": (lambda m: tp_shard_attention(our_model().blocks["0"].attn, 2), "no qkv.*to_mixle"),
    "our-attention-cp": (lambda m: cp_attention_forward(our_model().blocks["0"].attn, [X]), "no qkv.*to_mixle"),
    "plan": (lambda m: reference.validate_tp_pp_cp_plan(m, tp_size=4), "tp_size=4 must divide n_head=6"),
}


def odd_hidden() -> Any:
    mlp = torch.nn.Sequential(torch.nn.Linear(24, 33), torch.nn.GELU(), torch.nn.Linear(33, 24))
    return SimpleNamespace(attn=mixle_model().blocks[0].attn, mlp=mlp)


def one_with_mup(shards: list[TPAttentionShard]) -> list[TPAttentionShard]:
    shards[1].mup_attention = True
    return shards


def our_model() -> CausalLM:
    return CausalLM(CausalLMArgs(vocab_size=VOCAB, **SHAPE))


@pytest.mark.parametrize("name", MISUSE)
@pytest.mark.usefixtures("no_new_threads")
def test_misuse_names_the_values_the_rule_and_a_remedy(plain: Any, name: str) -> None:
    act, message = MISUSE[name]
    with pytest.raises(ConfigError, match=message):
        act(plain)
