"""The step runner on a tiny model: pending tokens, the order of what it gives, and the memory of a step."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.sequences import make_sequence
from tests.support.tiny_models import VOCABULARY, save_model
from trio_llm.engine.models.base import Model
from trio_llm.engine.models.load import load_model
from trio_llm.engine.ops.attention import TorchAttention
from trio_llm.engine.ops.batch import DeviceBatch
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import HostBatch, lay_out
from trio_llm.engine.worker.kv_cache import allocate_kv_cache
from trio_llm.engine.worker.profiling import peak_bytes
from trio_llm.engine.worker.runner import StepRunner, StepTensors

CPU = torch.device("cpu")
NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = save_model(tmp_path_factory.mktemp("model"))
    return load_model(folder, dtype="float32", device=CPU)


@dataclass
class Bench:
    """A runner with a cache."""

    model: Model
    buffers: StepBuffers = field(default_factory=lambda: StepBuffers(CPU, max_rows=4, depth=1))

    def __post_init__(self) -> None:
        self.runner = StepRunner(self.model, self.buffers)
        self.runner.attach(allocate_kv_cache(NUM_BLOCKS, self.model.kv_shape, CPU))

    @torch.inference_mode()
    def run(
        self, *chunks: ScheduledChunk, sampled_rows: dict[Sequence, int] | None = None, pad: int = 0
    ) -> StepTensors:
        host = lay_out(StepPlan(chunks), sampled_rows or {}, pad_rows_to=pad, trash_block=NUM_BLOCKS)
        return self.runner.run(host, keeps_hidden=True)


def whole(sequence: Sequence) -> ScheduledChunk:
    return ScheduledChunk(sequence, 0, len(sequence.token_ids), samples=True)


def test_a_token_that_is_pending_is_taken_from_where_the_step_before_samples_it(model: Model) -> None:
    bench = Bench(model)
    known = make_sequence("known", [5, 6, 7], block_ids=[0])
    pending = make_sequence("pending", [5, 6], block_ids=[1])
    for sequence in (known, pending):
        bench.run(ScheduledChunk(sequence, 0, 2, samples=False))
    bench.buffers.sampled_ids[:] = torch.tensor([50, 51, 7, 52])

    step = bench.run(
        ScheduledChunk(known, 2, 1, samples=True),
        ScheduledChunk(pending, 2, 1, samples=True),
        sampled_rows={pending: 2},
    )

    assert step.previous.tolist() == [7, 7]
    assert step.previous.dtype == torch.int64
    assert torch.equal(step.logits[0], step.logits[1])


@pytest.mark.parametrize("pad", [0, 6])
def test_logits_come_in_the_plans_order_though_rows_with_one_token_are_computed_first(model: Model, pad: int) -> None:
    prompts = {"long": list(range(10, 40)), "one": [9], "short": [11, 12, 13]}
    alone = {
        name: Bench(model).run(whole(make_sequence(name, prompt, block_ids=[0]))) for name, prompt in prompts.items()
    }
    sequences = [make_sequence(name, prompt, block_ids=[i]) for i, (name, prompt) in enumerate(prompts.items())]

    step = Bench(model).run(*map(whole, sequences), pad=pad)

    first = alone["one"].hidden
    assert step.hidden is not None
    assert first is not None
    assert len(step.hidden) == 34 + max(0, pad - 3)
    assert torch.allclose(step.hidden[0], first[0], atol=1e-5)
    for i, name in enumerate(prompts):
        assert torch.allclose(step.logits[i], alone[name].logits[0], atol=1e-4), name
    assert step.previous[:3].tolist() == [39, 9, 13]


def test_a_step_of_parts_of_prompts_alone_does_not_run_the_head(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(model)
    monkeypatch.setattr(model, "logits", None)

    step = bench.run(ScheduledChunk(make_sequence("a", [5, 6, 7], block_ids=[0]), 0, 2, samples=False))

    assert step.logits.shape == (0, VOCABULARY)
    assert step.previous.shape == (0,)


class _Watched(TorchAttention):
    """Notes what it is asked, and that all writes of a layer come first."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def begin(self, batch: DeviceBatch, kv: Tensor) -> None:
        self.calls.append("begin")
        super().begin(batch, kv)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.calls.append(f"write {layer}, {len(key)} tokens")
        super().write(layer, key, value)

    def attend(self, layer: int, query: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        self.calls.append(f"attend {layer}")
        return super().attend(layer, query, scale=scale, window=window, softcap=softcap)


def test_every_layer_writes_all_tokens_of_the_step_before_it_attends(model: Model) -> None:
    calls: list[str] = []
    runner = StepRunner(model, StepBuffers(CPU, max_rows=4, depth=1), make_attention=lambda: _Watched(calls))
    runner.attach(allocate_kv_cache(NUM_BLOCKS, model.kv_shape, CPU))
    sequences = [make_sequence(str(i), list(range(5, 8 + i)), block_ids=[i]) for i in range(3)]
    host = lay_out(StepPlan(tuple(map(whole, sequences))), {}, pad_rows_to=0, trash_block=NUM_BLOCKS)

    with torch.inference_mode():
        runner.run(host, keeps_hidden=False)

    assert calls == ["begin", "write 0, 12 tokens", "attend 0", "write 1, 12 tokens", "attend 1"]


def test_a_cache_that_is_replaced_is_let_go(model: Model) -> None:
    bench = Bench(model)
    bench.run(whole(make_sequence("a", [5, 6, 7], block_ids=[0])))
    old = weakref.ref(bench.runner._kv)

    bench.runner.attach(torch.empty(0))

    gc.collect()
    assert old() is None


def test_the_peak_of_a_step_grows_with_its_tokens_and_covers_its_logits(model: Model) -> None:
    bench = Bench(model)
    few, many = (bench.runner.profile_peak(num_tokens, 4) for num_tokens in (16, 200))
    rows = bench.runner.profile_peak(200, 50)

    assert 0 < few < many
    assert many > 200 * 48 * 4, "less than one activation of the widest layer"
    assert rows > 50 * VOCABULARY * 4


def test_profiling_leaves_the_cache_as_it_was(model: Model) -> None:
    bench = Bench(model)
    sequence = make_sequence("a", [5, 6, 7, 8], block_ids=[0])
    expected = bench.run(whole(sequence)).logits
    bench.run(ScheduledChunk(sequence, 0, 3, samples=False))

    bench.runner.profile_peak(64, 2)

    assert torch.allclose(bench.run(ScheduledChunk(sequence, 3, 1, samples=True)).logits, expected, atol=1e-5)


def test_peak_bytes_counts_what_is_held_at_once_and_not_what_is_freed_before() -> None:
    def one_after_the_other() -> None:
        for _ in range(5):
            torch.empty(1_000_000, dtype=torch.uint8)

    def together() -> None:
        kept = [torch.empty(1_000_000, dtype=torch.uint8) for _ in range(5)]
        assert kept

    assert 1_000_000 <= peak_bytes(one_after_the_other, CPU) < 2_000_000
    assert 5_000_000 <= peak_bytes(together, CPU) < 6_000_000


def test_running_a_batch_does_not_change_its_numbers_on_the_host(model: Model) -> None:
    bench = Bench(model)
    sequence = make_sequence("a", [5, 6, 7], block_ids=[0])
    host: HostBatch = lay_out(StepPlan((whole(sequence),)), {}, pad_rows_to=0, trash_block=NUM_BLOCKS)
    before = host.flat.copy()

    with torch.inference_mode():
        bench.runner.run(host, keeps_hidden=False)

    assert (host.flat == before).all()
