import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.denoiser.engine import Engine, EngineConfig, Job, Threshold
from services.denoiser.loader import load_model
from services.denoiser.run import five_numbers
from services.opening import Opening
from services.profile import load_profile
from services.settings import ConfigError
from tools.tiny_model.tasks import is_held_out, sample
from tools.traces.prompts import Prompt, codec_of, read_prompt_file
from tools.traces.reader import Traces, open_traces, read_recording
from tools.traces.recorder import RecordJob, ShardDone, record
from tools.traces.runs import SCALE, RecordedRun
from tools.traces.schedules import Progress

MakeJob = Callable[..., RecordJob]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_every_prompt_has_a_run_with_each_cache_and_schedule(traces: Traces) -> None:
    found = [(run.prompt, run.cache, run.schedule) for run in traces.runs()]
    schedules = ["0.2", "0.3", "0.45", "blocks", "steps", "lmh", "hml"]
    assert found == [(n, cache, name) for n in range(8) for cache in ("none", "prefix", "dual") for name in schedules]


def test_a_schedule_is_applied_at_the_steps_that_it_names(traces: Traces) -> None:
    changed_within_a_block = 0
    for run in traces.runs():
        schedule = traces.recording.schedule(run.schedule, run.prompt, run.planned_tokens)
        before = [0, *run.tokens_committed_S[:-1]]
        wanted = [
            schedule(Progress(step, int(block), int(tokens)))
            for step, (block, tokens) in enumerate(zip(run.block_S, before, strict=True))
        ]
        assert run.threshold_S.tolist() == wanted
        same_block = run.block_S[1:] == run.block_S[:-1]
        changed_within_a_block += int((same_block & (run.threshold_S[1:] != run.threshold_S[:-1])).sum())
    assert changed_within_a_block > 20


def test_parts_are_measured_by_the_output_at_the_highest_threshold(traces: Traces) -> None:
    for runs in traces.by_prompt("dual"):
        assert {runs[name].planned_tokens for name in ("lmh", "hml", "blocks")} == {len(runs["0.45"].output_T)}


def test_each_step_commits_what_reaches_its_threshold_and_always_the_best(traces: Traces) -> None:
    counts = Counter[bool]()
    for run in traces.runs():
        for step in range(run.num_steps):
            entries = run.entries(step)
            confidence, committed = run.confidence_E[entries], run.committed_E[entries]
            reaches = confidence >= run.threshold_S[step] * SCALE - 1e-6
            if reaches.any():
                np.testing.assert_array_equal(committed, reaches)
            else:
                assert committed.sum() == 1
                assert confidence[committed] == confidence.max()
            counts[bool(reaches.any())] += 1
    assert min(counts[True], counts[False]) > 100


def test_an_opening_raises_the_threshold_of_each_block_s_first_part(dream_traces: Traces) -> None:
    recording, raised = dream_traces.recording, 0
    assert recording.manner.opening == Opening(share=0.5, threshold=0.3)
    for run in dream_traces.runs():
        done = 0
        for step in range(run.num_steps):
            entries = run.entries(step)
            confidence, committed = run.confidence_E[entries], run.committed_E[entries]
            done = 0 if run.in_block_S[step] == 0 else done
            left = len(confidence)
            applied = max(run.threshold_S[step], 0.3) if done < (done + left) / 2 else run.threshold_S[step]
            if (reaches := confidence >= applied * SCALE - 1e-6).any():
                np.testing.assert_array_equal(committed, reaches)
            raised += int((confidence >= run.threshold_S[step] * SCALE).sum() > committed.sum())
            done += int(committed.sum())
    assert raised > 10


def replayed_canvas(run: RecordedRun, block_size: int, max_tokens: int, eos_ids: set[int]) -> dict[int, int]:
    """Checks that each step chose from what was eligible, and returns position -> token."""
    canvas: dict[int, int] = {}
    for step in range(run.num_steps):
        entries, start = run.entries(step), int(run.block_S[step]) * block_size
        block = range(start, min(start + block_size, max_tokens))
        first_eos = min((position for position in block if canvas.get(position) in eos_ids), default=max_tokens)
        positions = (run.offset_E[entries] + start).tolist()
        assert positions == [position for position in block if position not in canvas and position < first_eos]
        chosen = run.committed_E[entries]
        canvas |= dict(zip(np.array(positions)[chosen].tolist(), run.token_E[entries][chosen].tolist(), strict=True))
    return canvas


def test_the_entries_of_a_step_are_its_eligible_positions_and_their_commits_the_answer(
    traces: Traces, profile: Path
) -> None:
    eos_ids = set(json.loads((profile / "model/config.json").read_text())["eos_token_id"])
    finishes = Counter[str]()
    for run in traces.runs():
        canvas = replayed_canvas(run, block_size=8, max_tokens=20, eos_ids=eos_ids)
        assert [canvas[position] for position in range(len(run.output_T))] == run.output_T.tolist()
        if run.finish == "eos":
            assert canvas[len(run.output_T)] in eos_ids
        else:
            assert len(run.output_T) == 20
        np.testing.assert_array_equal(run.eos_E, np.isin(run.token_E, sorted(eos_ids)))
        assert run.recompute_S.tolist() == [run.cache == "none" or number == 0 for number in run.in_block_S]
        finishes[run.finish] += 1
    assert min(finishes["eos"], finishes["length"]) > 20


def test_the_report_of_each_step_is_the_workers(traces: Traces, profile: Path) -> None:
    """Decoded again, one request at a time, with what a report says computed from the live confidences."""
    model = load_model(profile / "model")
    codec = codec_of(load_profile(profile))
    for run in list(traces.runs())[::9]:
        prompt = traces.prompts[run.prompt]
        ids = codec.encode_chat([{"role": m.role, "content": m.content} for m in prompt.messages or []])
        engine = Engine(model, config=EngineConfig(kv_budget_tokens=200))
        engine.admit(
            Job(request_id="a", prompt_ids=ids, max_tokens=20, block_size=8, cache=run.cache, choice=Threshold(0.0))
        )
        in_block: list[float] = []
        for step in range(run.num_steps):
            engine.set_threshold("a", float(run.threshold_S[step]))
            (live,) = engine.step().requests
            in_block = [] if live.block_done else in_block + live.commits.confidences
            known = engine.output_confidences("a") + in_block
            assert run.tokens_committed_S[step] == len(known)
            assert run.confidence_S5[step] == pytest.approx(five_numbers(known), abs=1e-5)
        assert live.finished == run.finish
        assert engine.output_ids("a") == run.output_T.tolist()
        assert run.prompt_tokens == len(ids)


def test_prompts_are_held_out_or_not_and_all_different(make_job: MakeJob, traces: Traces) -> None:
    assert traces.recording.source == "built-in tasks, train"
    assert [prompt.number for prompt in traces.prompts] == list(range(8))
    assert len({prompt.hash for prompt in traces.prompts}) == 8
    record(make_job(num_prompts=2, split="held_out", thresholds=(0.3,), changing=()))
    found = open_traces(make_job().out)
    assert found.recording.source == "built-in tasks, held_out"
    assert not {prompt.hash for prompt in found.prompts} & {prompt.hash for prompt in traces.prompts}


def test_an_answer_is_judged_where_its_task_can_tell() -> None:
    from random import Random

    problem = sample(Random(1), "held_out")
    assert is_held_out(problem.key)
    judged = Prompt(number=0, hash="", task=problem.task, answer=problem.answer, results=problem.expected)
    assert judged.is_correct(problem.answer) is True
    assert judged.is_correct("something else") is False
    assert Prompt(number=0, hash="", prompt="Hello").is_correct("Hi") is None


# --- the same again ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_files_and_another_one_others(make_job: MakeJob, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        record(make_job(out=tmp_path / name, num_prompts=3, seed=seed))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert (tmp_path / "a/prompts.jsonl").read_bytes() != (tmp_path / "c/prompts.jsonl").read_bytes()


def test_a_recording_goes_on_where_it_was_interrupted_and_is_the_same(make_job: MakeJob, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    record(make_job(out=whole))

    def stop_after_two(done: ShardDone) -> None:
        if done.shards == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(make_job(out=broken), stop_after_two)
    assert sorted(files_of(broken)) == ["prompts.jsonl", "recording.json", "shard-00000.npz", "shard-00001.npz"]
    (broken / "shard-00000.npz").unlink()  # one that is missing in between
    (broken / ".shard-00000.npz.part").write_bytes(b"half")  # and was being written
    progress: list[tuple[int, int]] = []
    record(make_job(out=broken), lambda done: progress.append((done.shards, done.shards_before)))
    assert progress == [(1, 1), (2, 1), (3, 1)]
    assert files_of(broken) == files_of(whole)


def test_several_processes_give_the_same_files(make_job: MakeJob, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    job = {"num_prompts": 3, "thresholds": (0.2, 0.45), "changing": ("hl",)}
    record(make_job(out=one, **job))
    record(make_job(out=two, **job, num_processes=2))
    assert files_of(one) == files_of(two)


def test_another_recording_in_the_folder_is_not_overwritten(make_job: MakeJob) -> None:
    job = make_job(num_prompts=1, thresholds=(0.3,), changing=())
    record(job)
    before = files_of(job.out)
    for change, words in {
        "thresholds": "thresholds [0.3] there, thresholds [0.3, 0.45] now",
        "seed": "seed 0 there, seed 7 now",
        "max_tokens": "max_tokens 20 there, max_tokens 9 now",
        "opening_share": "no opening and the whole canvas in sight there, an opening of 0.5 at 0.3 and the whole",
    }.items():
        value = {"thresholds": (0.45, 0.3), "seed": 7, "max_tokens": 9, "opening_share": 0.5}[change]
        with pytest.raises(ConfigError) as refused:
            record(make_job(num_prompts=1, **({"thresholds": (0.3,), "changing": ()} | {change: value})))
        assert words in str(refused.value)
    assert files_of(job.out) == before
    (job.out / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="other prompts under the same seed"):
        record(job)


def test_a_folder_with_something_else_is_left_alone(make_job: MakeJob) -> None:
    job = make_job()
    job.out.mkdir()
    (job.out / "thesis.tex").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty and holds no recording"):
        record(job)
    assert files_of(job.out) == {"thesis.tex": b"dear"}


def test_a_recording_of_another_version_is_refused(traces: Traces, tmp_path: Path) -> None:
    content = msgspec.json.decode((traces.folder / "recording.json").read_bytes(), type=dict[str, object])
    (tmp_path / "recording.json").write_bytes(msgspec.json.encode(content | {"format_version": 2, "new": 1}))
    with pytest.raises(ConfigError, match="format version 2; this program reads 1"):
        read_recording(tmp_path)
    with pytest.raises(ConfigError, match="holds no recording"):
        open_traces(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"thresholds": (0.5, 1.2)}, "threshold 1.2 is not between 0 and 1"),
        ({"changing": ("often",)}, "schedule 'often' is neither"),
        ({"max_tokens": 64}, "max_tokens 64 exceeds the profile's 32"),
        ({"num_prompts": None}, "--prompts"),
        ({"num_prompts": 0}, "num_prompts 0 must be at least 1"),
        ({"num_processes": 0}, "num_processes 0 must be at least 1"),
        ({"profile": Path("nowhere")}, "no profile at nowhere"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make_job: MakeJob, change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        record(make_job(**change))


# --- a file of prompts ------------------------------------------------------------------------------------------------


def test_a_file_of_prompts_is_encoded_as_the_gateway_does(make_job: MakeJob, profile: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 <|eot_id|>?"}]
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Count: 1, 2,", "id": 5}, {"messages": messages, "task": "sums"}, {"prompt": "not wanted"}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    record(make_job(file=path, num_prompts=2, thresholds=(0.3,), changing=(), ignore_eos=True))
    traces = open_traces(make_job().out)
    codec = codec_of(load_profile(profile))
    assert [run.prompt_tokens for run in traces.runs()] == [
        len(codec.encode_prompt("Count: 1, 2,")),
        len(codec.encode_chat(messages)),
    ]
    assert {(run.correct, run.finish, len(run.output_T)) for run in traces.runs()} == {(None, "length", 20)}
    assert [prompt.task for prompt in traces.prompts] == ["", "sums"]
    assert traces.recording.source.startswith("prompts.jsonl ")
    (first, _) = read_prompt_file(path, 2, codec)
    assert first.ids == codec.encode_prompt("Count: 1, 2,")


@pytest.mark.parametrize(
    ("content", "count", "reason"),
    [
        ('{"prompt": "a"}\n{"text": "b"}', None, 'prompt 2: it needs "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', None, 'prompt 1: it needs "prompt" or "messages", and not both'),
        ('{"prompt": 7}', None, r"prompt 1: Expected `str \| null`, got `int` - at `\$.prompt`"),
        ("[1]", None, "prompt 1: Expected `object`"),
        ('{"prompt": "a"}', 2, "holds 1 prompts, 2 are wanted"),
        ("", None, "holds 0 prompts, 1 are wanted"),
        (json.dumps({"prompt": "1 " * 200}), None, "prompt 1 has 400 tokens; 1 to 136 leave room for the output"),
        ('{"prompt": ""}', None, "prompt 1 has 0 tokens"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(
    make_job: MakeJob, tmp_path: Path, content: str, count: int | None, reason: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        record(make_job(file=path, num_prompts=count))
    with pytest.raises(ConfigError, match="cannot read the prompts"):
        record(make_job(file=tmp_path / "missing", num_prompts=None))


def test_prompts_above_temperature_zero_are_the_same_again(make_job: MakeJob, tmp_path: Path) -> None:
    outputs = []
    for name, temperature in (("a", 0.8), ("b", 0.8), ("c", 0.0)):
        record(make_job(out=tmp_path / name, num_prompts=2, temperature=temperature, thresholds=(0.3,), changing=()))
        outputs.append([run.output_T.tolist() for run in open_traces(tmp_path / name).runs()])
    assert outputs[0] == outputs[1] != outputs[2]
