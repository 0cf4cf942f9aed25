"""Scores of a model on question files, as the paper's tables have them.

    python experiments/evaluate.py --task=search --model DIR --data nq.jsonl hotpotqa=dev.json
    python experiments/evaluate.py --task=math --model DIR --data aime24.parquet --samples 32
    python experiments/evaluate.py --model runs/<run>/model

The last evaluates on the built-in held-out questions of the task. Every sample is written into the
folder `--out` as soon as it is there, and the same command with the same `--out` goes on where it
was stopped. `run.py` calls `held_out` on its own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import dataclasses
import datetime
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import assembly
import numpy as np

from copc_jax import data, hf, metrics
from copc_jax.config import parse_command, refuse
from copc_jax.distributed import Processes
from copc_jax.rollout.client import RolloutError, SamplingParams, SGLangClient
from copc_jax.rollout.collector import Collector, episode_seed
from copc_jax.rollout.episode import EpisodeFailed, run_episode
from copc_jax.rollout.launch import LaunchError, ServerProcess
from copc_jax.settings import RunConfig
from copc_jax.tools.retriever import RetrieverError
from copc_jax.types import Prompt, Trajectory

SAMPLES_FILE, PROBLEMS_FILE = "samples.jsonl", "problems.csv"
RESULTS_FILE, TABLE_FILE, SETTINGS_FILE = "results.json", "table.md", "settings.json"

# Columns of the paper's tables, in its order, and how files call these sets.
_SETS = {
    **{"NQ": "nq naturalquestions", "TriviaQA": "triviaqa tqa tq", "PopQA": "popqa"},
    **{"HotpotQA": "hotpotqa hotpot", "2Wiki": "2wiki 2wikimultihopqa 2wikimqa"},
    **{"MuSiQue": "musique", "Bamboogle": "bamboogle"},
    **{"AIME24": "aime24 aime2024", "AIME25": "aime25 aime2025", "AIME26": "aime26 aime2026"},
    **{"BRUMO25": "brumo25 brumo2025", "BeyondAIME": "beyondaime"},
}
_NAMES = {alias: name for name, aliases in _SETS.items() for alias in aliases.split()}

# Source: the paper's evaluation; tool observations count, and turns are not limited beside.
_TOKENS = {"search": 8192, "math": 38912}
_TURNS = 64
_ATTEMPTS = 4  # Of one episode, when servers or tools fail.
_LOST_IN_A_ROW = 8  # Episodes given up one after another that end the evaluation.


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How a model is evaluated."""

    data: tuple[str, ...] = ()
    """Question files (JSON lines, JSON, CSV, Parquet), or name=path to name a set; none takes the
    built-in held-out questions."""
    samples: int = 1
    """Samples of each problem; the score is the mean over problems of the mean over samples."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 is off."""
    limit: int = 0
    """First questions of each set; 0 takes all."""
    out: Path | None = None
    """Folder of the results; by default eval-<task>-<time> beside the model. A folder that holds
    part of the same evaluation is completed."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled."""
        for name, least in (("samples", 1), ("limit", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples must be 1 at temperature 0, where all are the same; got {self.samples}"
            )


def held_out(
    collector: Collector,
    client: SGLangClient,
    config: RunConfig,
    parts: assembly.Parts,
    prompts: Sequence[Prompt],
    processes: Processes | None = None,
) -> dict[str, float]:
    """Play every prompt once, greedily, on a collector that runs.

    Args:
        collector: of this process.
        client: of its servers.
        config: of the run.
        parts: of the run.
        prompts: all of them; of several processes each plays its share.
        processes: those of the run; None is one.

    Returns:
        The task's score (`em` or `accuracy`), such as `em` with `em_low` and `em_high` (Wilson
        95%), `em_<source>` for each source, `count`, the mean of each figure of the task an
        episode, and the share of `truncated` episodes.
    """
    play = _player(config, EvaluationConfig(), parts, client)
    processes = processes or Processes()
    share = prompts[processes.index :: processes.count]
    _, told = processes.together(
        "the evaluation",
        lambda: collector.evaluate(
            lambda prompt: play(prompt, 0), share, config.rollout.max_in_flight
        ),
        lambda episodes: [(episode.info, episode.status) for episode in episodes],
    )
    outcomes = [told[i % processes.count][i // processes.count] for i in range(len(prompts))]
    infos = [info for info, _ in outcomes]
    name = parts.task.score_name
    right = np.asarray([info.get(name, 0.0) for info in infos])
    low, high = metrics.confidence_interval(int(right.sum()), len(right))
    result = {
        name: float(right.mean()),
        f"{name}_low": low,
        f"{name}_high": high,
        "count": float(len(right)),
    }
    for source in sorted({prompt.source for prompt in prompts}):
        chosen = np.asarray([prompt.source == source for prompt in prompts])
        result[f"{name}_{source.replace('-', '')}"] = float(right[chosen].mean())
    for figure in sorted({figure for info in infos for figure in info} - {name}):
        result[figure] = float(np.mean([info.get(figure, 0.0) for info in infos]))
    result["truncated"] = float(np.mean([status == "truncated" for _, status in outcomes]))
    return result


def _player(
    config: RunConfig, how: EvaluationConfig, parts: assembly.Parts, client: SGLangClient
) -> Callable[[Prompt, int], Any]:
    """Return what plays a sample of a prompt; its seed depends on these two and the run's alone."""
    budget = assembly.budget(config)
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        stop_token_ids=tuple(parts.model.eos_token_ids),
    )

    async def play(prompt: Prompt, sample: int) -> Trajectory:
        number = int.from_bytes(hashlib.sha256(prompt.prompt_id.encode()).digest()[:8], "big")
        return await run_episode(
            client,
            parts.task,
            parts.tokenizer,
            prompt,
            sample=sample,
            sampling=sampling,
            budget=budget,
            seed=episode_seed(config.seed, number, sample),
        )

    return play


# --------------------------------------------------------------------------------------------------
# The command


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Evaluate a model, print the table and return the figures of all questions together.

    Raises:
        SystemExit: 2 when the evaluation cannot start or go on, 1 when samples are missing at its
            end, 130 after Ctrl-C.
    """
    how, config = parse_command(
        EvaluationConfig,
        _defaults,
        sys.argv[1:] if arguments is None else arguments,
        "Evaluate a model on question files, or on the built-in held-out questions.",
    )
    if config.model == "tiny":
        refuse("--model must name an HF folder, such as runs/<run>/model")
    try:
        evaluation = Evaluation(how, config)
    except assembly.START_ERRORS as error:
        refuse(error)
    try:
        with _interruptible():
            evaluation.play()
    except (EvaluationError, LaunchError, RolloutError, RetrieverError) as error:
        refuse(error)
    except KeyboardInterrupt:
        print("stopped; the same command with --out goes on", file=sys.stderr)
        raise SystemExit(130) from None
    results = evaluation.report()
    if results["missing"]:
        raise SystemExit(1)
    return results


def _defaults(
    config: RunConfig, flag: Callable[[str], str | None]
) -> tuple[EvaluationConfig, RunConfig]:
    """The paper's protocol where files are given, and one greedy sample otherwise."""
    if flag("--data") is None:
        return EvaluationConfig(), config
    tokens = flag("--rollout.max-tokens") or flag("--rollout.max_tokens") or ""
    limit = int(tokens) if tokens.isdigit() and int(tokens) > 1 else _TOKENS[config.task]
    rollout = dataclasses.replace(
        config.rollout,
        max_turns=_TURNS,
        max_tokens=limit,
        max_new_tokens=limit - 1,
        max_observation_tokens=max(limit // 8, config.rollout.max_observation_tokens),
    )
    how = EvaluationConfig()
    if config.task == "math":
        how = EvaluationConfig(samples=32, temperature=0.6)
    return how, dataclasses.replace(config, rollout=rollout)


class EvaluationError(RuntimeError):
    """The evaluation cannot go on; what has been sampled is kept."""


class Evaluation:
    """One evaluation and its folder: which samples are there, which are missing, what they say."""

    def __init__(self, how: EvaluationConfig, config: RunConfig):
        """Read everything and compare it with what the folder holds; nothing is sampled yet.

        Raises:
            ValueError: unusable files or model, or a folder that holds another evaluation.
        """
        self.how = how
        folder = assembly.model_folder(config)
        assert folder is not None
        config = dataclasses.replace(config, model=str(folder))
        self.config = _fit(config, hf.load_config(folder).max_position_embeddings)
        # Files are read before anything expensive is built.
        self.prompts = assembly.read_files(config, how.data) if how.data else []
        self.out = how.out or _new_folder(config)
        if how.data:
            self._open()
        assembly.prepare_process(config)
        # Of files, no built-in problem is asked; to make them all would take seconds.
        few = dataclasses.replace(config.math, train=1, held_out=1) if how.data else config.math
        self.parts = assembly.build(dataclasses.replace(self.config, math=few))
        if not how.data:
            self.prompts = self.parts.environment.held_out[: config.eval.final_questions or None]
            self._open()
        elif config.task == "search" and config.search.retriever_url is None:
            print(assembly.NO_CORPUS)
        self.records = _read_samples(self.out / SAMPLES_FILE)
        self.failures = 0
        self.given_up: list[tuple[str, int]] = []

    def _open(self) -> None:
        """Make the folder, or compare it with what is asked for."""
        self.prompts = _first_of_each(self.prompts, self.how.limit)
        self.out.mkdir(parents=True, exist_ok=True)
        _check_settings(self.out / SETTINGS_FILE, self._settings())
        print(f"results: {self.out}", flush=True)

    def _settings(self) -> dict[str, Any]:
        """Everything that a sample depends on, by the flag that sets it."""
        rollout = self.config.rollout
        limits = ("max_turns", "max_tokens", "max_new_tokens", "max_observation_tokens")
        task = dataclasses.asdict(getattr(self.config, self.config.task))
        task.pop("retriever_api_key", None)
        settings = {
            "task": self.config.task,
            "contents of --model": model_digest(Path(self.config.model)),
            "data": [str(name) for name in self.how.data],
            "contents of --data": data.dataset_fingerprint(self.prompts, 0)["sha256"],
            **{name: getattr(self.how, name) for name in ("samples", "temperature", "top_p")},
            "limit": self.how.limit,
            "seed": self.config.seed,
            **{f"rollout.{name}": getattr(rollout, name) for name in limits},
            **{f"{self.config.task}.{name}": value for name, value in task.items()},
        }
        return json.loads(json.dumps(settings, default=str))

    def wanted(self) -> list[tuple[Prompt, int]]:
        """The samples that are not there yet; those of a problem follow each other."""
        pairs = itertools.product(self.prompts, range(self.how.samples))
        return [pair for pair in pairs if (pair[0].prompt_id, pair[1]) not in self.records]

    def play(self) -> None:
        """Sample all that is missing, and write each sample down as it comes.

        Raises:
            EvaluationError: another process writes into the folder, or too much fails.
            LaunchError: the server does not start.
            RolloutError: servers cannot be used; what has been sampled is kept.
        """
        if not self.wanted():
            return
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_lock(self.out / SAMPLES_FILE))
            # Another process may have written until now.
            self.records = _read_samples(self.out / SAMPLES_FILE)
            wanted = self.wanted()
            if self.records:
                print(f"{len(self.records)} samples are there, {len(wanted)} are missing")
            log, key = self.out / "server.log", assembly.server_key(self.config)
            server = assembly.launch(self.config, Path(self.config.model), log, key)
            if server is not None:
                stack.enter_context(server)
            asyncio.run(self._play(wanted, file, server, key))

    async def _play(
        self,
        wanted: list[tuple[Prompt, int]],
        file: TextIO,
        server: ServerProcess | None,
        key: str | None,
    ) -> None:
        urls = self.config.rollout.urls or (server.url,)  # pyright: ignore[reportOptionalMemberAccess]
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(assembly.client(self.config, urls, key=key))
            for tool in self.parts.environment.tools:
                await stack.enter_async_context(tool)
            await client.check(wait_s=30.0)
            await self.parts.environment.check()
            play = _player(self.config, self.how, self.parts, client)
            progress = _Progress(len(wanted))
            queue = iter(wanted)
            in_a_row = 0

            async def work() -> None:
                nonlocal in_a_row
                for prompt, sample in queue:
                    trajectory = await self._attempt(play, prompt, sample)
                    if trajectory is None:
                        in_a_row += 1
                        self.given_up.append((prompt.prompt_id, sample))
                        if in_a_row >= _LOST_IN_A_ROW:
                            raise EvaluationError(
                                f"{in_a_row} episodes in a row failed {_ATTEMPTS} times each; what "
                                f"has been sampled is kept: run again with --out {self.out}"
                            )
                    else:
                        in_a_row = 0
                        record = self._record(prompt, trajectory)
                        self.records[prompt.prompt_id, sample] = record
                        file.write(json.dumps(record, ensure_ascii=False) + "\n")
                        file.flush()
                    progress.step(self.failures)

            # The first error ends all workers, and is what the caller sees.
            tasks = [
                asyncio.ensure_future(work())
                for _ in range(min(self.config.rollout.max_in_flight, len(wanted)))
            ]
            if server is not None:
                tasks.append(asyncio.ensure_future(_keep_alive(server, tasks[:])))
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                progress.end(self.failures)

    async def _attempt(
        self, play: Callable[[Prompt, int], Any], prompt: Prompt, sample: int
    ) -> Trajectory | None:
        """Play one sample; None when servers or tools failed every time."""
        for attempt in range(_ATTEMPTS):
            with contextlib.suppress(EpisodeFailed):
                trajectory = await play(prompt, sample)
                if trajectory.status != "aborted":
                    return trajectory
            self.failures += 1
            await asyncio.sleep(0.5 * 2**attempt)
        return None

    def _record(self, prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
        """One line of the samples: an episode that was cut by its budget is wrong."""
        tokenizer = self.parts.tokenizer
        ids, sampled = trajectory.token_ids, trajectory.is_action
        start = int(np.argmax(sampled)) if sampled.any() else len(ids)
        edges = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(ids)]
        turns = [
            tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False)
            for a, b in itertools.pairwise(edges)
            if sampled[a]
        ]
        score = trajectory.info.get(self.parts.task.score_name, 0.0)
        return {
            "prompt_id": prompt.prompt_id,
            "source": prompt.source,
            "sample": trajectory.sample,
            "correct": score if trajectory.status == "done" else 0.0,
            "answer": self.parts.environment.extract_answer(turns),
            "status": trajectory.status,
            **trajectory.info,
            "tokens": len(ids) - start,
            "sampled_tokens": int(sampled.sum()),
            "prompt_tokens": start,
            "text": tokenizer.decode(ids[start:].tolist(), skip_special_tokens=False),
        }

    # ---------------------------------------------------------------- results

    def report(self) -> dict[str, Any]:
        """Write the table and the files beside it, print the table, and return its figures."""
        name = self.parts.task.score_name
        problems = [self._problem(prompt) for prompt in self.prompts]
        sources = sorted(dict.fromkeys(p.source for p in self.prompts), key=_column)
        sets = {
            source: self._set([p for p in problems if p["source"] == source]) for source in sources
        }
        scored = [figures for figures in sets.values() if figures["problems"]]
        missing = sum(self.how.samples - problem["samples"] for problem in problems)
        whole = self._set(problems)
        results = {
            name: whole["score"],
            f"{name}_low": whole["low"],
            f"{name}_high": whole["high"],
            "count": float(whole["problems"]),
            **{f"{name}_{source.replace('-', '')}": f["score"] for source, f in sets.items()},
            **{key: whole[key] for key in whole if key not in ("score", "low", "high", "problems")},
            "average": dict(zip(("score", "low", "high"), _average(scored), strict=True)),
            "sets": sets,
            "missing": missing,
            "failures": self.failures,
        }
        (self.out / RESULTS_FILE).write_text(json.dumps(results, indent=2) + "\n")
        with (self.out / PROBLEMS_FILE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, problems[0].keys())
            writer.writeheader()
            writer.writerows(problems)
        table = self._table(sets, results)
        (self.out / TABLE_FILE).write_text(table, encoding="utf-8")
        print(table)
        print(f"results: {self.out}")
        return results

    def _problem(self, prompt: Prompt) -> dict[str, Any]:
        """One row of the problems; a problem without a sample has no mean."""
        rows = [
            record
            for sample in range(self.how.samples)
            if (record := self.records.get((prompt.prompt_id, sample))) is not None
        ]

        def mean(key: str) -> float | str:
            return float(np.mean([row.get(key, 0.0) for row in rows])) if rows else ""

        return {
            "prompt_id": prompt.prompt_id,
            "source": prompt.source,
            "question": prompt.messages[-1]["content"] if prompt.messages else "",
            "gold": json.dumps(prompt.gold, ensure_ascii=False),
            "samples": len(rows),
            "correct": mean("correct"),
            "truncated": float(np.mean([r["status"] == "truncated" for r in rows])) if rows else "",
            self._calls: mean(self._calls),
            "turns": mean("turns"),
            "tokens": mean("tokens"),
            "answers": json.dumps([row["answer"] for row in rows], ensure_ascii=False),
        }

    @property
    def _calls(self) -> str:
        return "searches" if self.config.task == "search" else "calls"

    def _set(self, problems: list[dict[str, Any]]) -> dict[str, float]:
        """The figures of a set: means over its problems, and where the score may truly lie."""
        there = [problem for problem in problems if problem["samples"]]
        means = {
            key: float(np.mean([p[key] for p in there])) if there else math.nan
            for key in ("correct", "truncated", self._calls, "turns", "tokens")
        }
        score = means.pop("correct")
        low, high = clustered_interval([p["correct"] for p in there], self.how.samples)
        passes = {
            f"pass@{k}": float(
                np.mean([_passes(p, k) for p in there if p["samples"] >= k] or math.nan)
            )
            for k in self._passes
        }
        return {"score": score, "low": low, "high": high, "problems": len(there), **means, **passes}

    @property
    def _passes(self) -> list[int]:
        """Numbers of samples to give pass@k for: 2, 4, 8 and so on."""
        return [2**n for n in range(1, self.how.samples.bit_length())]

    def _table(self, sets: Mapping[str, dict[str, float]], results: Mapping[str, Any]) -> str:
        """The table in the paper's shape, a set a column; scores and shares in percent."""
        heads = [*(_display(source) for source in sets)]
        columns = list(sets.values())
        score = "EM" if self.config.task == "search" else f"avg@{self.how.samples}"
        lines = {
            score: [f"{100 * c['score']:.2f}" for c in columns],
            "95% interval": [f"{100 * c['low']:.1f} to {100 * c['high']:.1f}" for c in columns],
            **{
                name: [f"{100 * c[name]:.2f}" for c in columns]
                for name in (f"pass@{k}" for k in self._passes)
            },
            "questions": [f"{c['problems']:g}" for c in columns],
            f"{self._calls} an episode": [f"{c[self._calls]:.2f}" for c in columns],
            "tokens an episode": [f"{c['tokens']:.0f}" for c in columns],
            "truncated": [f"{100 * c['truncated']:.1f}%" for c in columns],
        }
        if len(sets) > 1:
            heads.append("average")
            mean = results["average"]
            lines[score].append(f"{100 * mean['score']:.2f}")
            lines["95% interval"].append(f"{100 * mean['low']:.1f} to {100 * mean['high']:.1f}")
            for name in list(lines)[2:]:
                lines[name].append("")
        rows = [["", *heads], ["---"] * (len(heads) + 1)]
        rows += [[name, *cells] for name, cells in lines.items()]
        text = "".join("| " + " | ".join(row) + " |\n" for row in rows)
        how = self.how
        sampling = "greedy" if how.temperature == 0 else f"temperature {how.temperature:g}"
        text += (
            f"\n{sampling}, top_p {how.top_p:g}, samples a problem: {how.samples}, at most "
            f"{self.config.rollout.max_tokens} tokens of prompt, turns and observations; an "
            "episode that is cut is wrong.\n"
        )
        if self.failures:
            text += f"\n{self.failures} attempts failed for reasons that are not the policy's.\n"
        if results["missing"]:
            text += (
                f"\n{results['missing']} SAMPLES ARE MISSING, as servers or tools failed; they are "
                f"not in the scores. Run again with --out {self.out} to ask for them.\n"
            )
        return text


# --------------------------------------------------------------------------------------------------
# Statistics


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Chance that at least one of `k` samples of a problem is right, from more samples of it.

    Source: Chen et al. 2021, the unbiased estimate 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: there are fewer than k samples, or not as many that can be right.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right, does not exist")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _passes(problem: Mapping[str, Any], k: int) -> float:
    samples = problem["samples"]
    return pass_at(k, samples=samples, right=round(samples * problem["correct"]))


def clustered_interval(means: Sequence[float], samples: int) -> tuple[float, float]:
    """Wilson's 95% interval of a mean over problems, of which each has several samples.

    The samples of a problem are alike, so they count for less than as many problems. The number of
    independent samples that would spread as much as the problems' means do takes the place of n; it
    lies between the number of problems and that of samples. With one sample each, or where all
    means are 0 or all are 1, it is the number of problems.

    Args:
        means: share of right samples, one number a problem.
        samples: samples of each problem.
    """
    count = len(means)
    if not count:
        return math.nan, math.nan
    share = float(np.mean(means))
    effective = float(count)
    if samples > 1 and count > 1 and 0 < share < 1:
        variance = float(np.var(means, ddof=1)) / count
        most = count * samples
        effective = most if variance == 0 else np.clip(share * (1 - share) / variance, count, most)
    z2 = 1.959963984540054**2 / effective
    center = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2) / (1 + z2) * math.sqrt(share * (1 - share) + z2 / 4)
    return max(center - half, 0.0), min(center + half, 1.0)


def _average(sets: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """Mean over sets with its 95% interval, from those of the sets.

    Source: Zou and Donner 2008, intervals of sums of independent estimates from their own limits.
    """
    if not sets:
        return math.nan, math.nan, math.nan
    score, low, high = (np.asarray([s[key] for s in sets]) for key in ("score", "low", "high"))
    mean = float(score.mean())
    below = math.sqrt(float(np.sum((score - low) ** 2))) / len(sets)
    above = math.sqrt(float(np.sum((high - score) ** 2))) / len(sets)
    return mean, max(mean - below, 0.0), min(mean + above, 1.0)


# --------------------------------------------------------------------------------------------------
# Files


def _display(source: str) -> str:
    return _NAMES.get(re.sub("[^a-z0-9]", "", source.lower()), source)


def _column(source: str) -> tuple[int, str]:
    """Where a set stands in the table: the paper's sets in its order, then all others."""
    names = list(_SETS)
    display = _display(source)
    return names.index(display) if display in names else len(names), display


def _first_of_each(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts of each source; all where it is 0."""
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.source] = seen.get(prompt.source, 0) + 1
        if not limit or seen[prompt.source] <= limit:
            chosen.append(prompt)
    return chosen


def _fit(config: RunConfig, context: int) -> RunConfig:
    """Lower the token budget to what the model can hold."""
    rollout = config.rollout
    if rollout.max_tokens <= context:
        return config
    print(f"the model holds {context} tokens: the budget of {rollout.max_tokens} is lowered to it")
    rollout = dataclasses.replace(
        rollout, max_tokens=context, max_new_tokens=min(rollout.max_new_tokens, context - 1)
    )
    return dataclasses.replace(config, rollout=rollout)


def _new_folder(config: RunConfig) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(config.model).absolute().parent / f"eval-{config.task}-{now}"


def model_digest(folder: Path) -> str:
    """Hash of what a model computes: configuration, weights and tokenizer."""
    total = hashlib.sha256()
    names = ("config.json", "tokenizer.json")
    for file in sorted(
        p for p in folder.iterdir() if p.name in names or p.suffix == ".safetensors"
    ):
        with file.open("rb") as content:
            total.update(
                f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}".encode()
            )
    return total.hexdigest()


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    if file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        differing = [
            name if name.startswith("contents") else f"{name} (was {old}, is {new})"
            for name in {**saved, **settings}
            if (old := saved.get(name)) != (new := settings.get(name))
        ]
        if differing:
            raise ValueError(
                f"{file.parent} holds another evaluation, which differs in {', '.join(differing)}: "
                "give the same settings, or another --out"
            )
        return
    if (file.parent / SAMPLES_FILE).exists():
        raise ValueError(f"{file.parent} holds samples without {file.name}: give another --out")
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _read_samples(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Read what is there; a last line that is not complete does not count."""
    records: dict[tuple[str, int], dict[str, Any]] = {}
    if not file.exists():
        return records
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].decode().split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            records[record["prompt_id"], record["sample"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{number}: no sample of an evaluation: {error}") from None
    return records


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let a scheduler's SIGTERM end what is inside as orderly as Ctrl-C does."""
    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[TextIO]:
    """Open a file to append to, which no second process may do meanwhile.

    A last line that a kill cut short is taken off.
    """
    with file.open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvaluationError(f"{file.parent}: another process evaluates into it") from None
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        yield handle


async def _keep_alive(server: ServerProcess, others: Sequence[asyncio.Task[None]]) -> None:
    """Start a server that died again, until the others have ended."""
    while not all(task.done() for task in others):
        await asyncio.sleep(0.2)
        if not server.alive():
            print("\nthe rollout server ended; starting it again", flush=True)
            await asyncio.to_thread(server.restart)


class _Progress:
    """How many samples are there, and how long the rest will take."""

    def __init__(self, total: int):
        self._total, self._done = total, 0
        self._terminal = sys.stderr.isatty()
        self._every = 0.5 if self._terminal else 10.0
        self._start = self._last = time.monotonic()

    def step(self, failures: int) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self._show(failures, "\r" if self._terminal else "\n")

    def end(self, failures: int) -> None:
        self._show(failures, "\n")

    def _show(self, failures: int, end: str) -> None:
        spent = time.monotonic() - self._start
        left = spent / max(self._done, 1) * (self._total - self._done)
        text = (
            f"{self._done}/{self._total} samples, {_duration(spent)} spent, {_duration(left)} left"
        )
        if failures:
            text += f", {failures} failed attempts"
        print(f"{text:<78}", end=end, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


if __name__ == "__main__":
    main()
