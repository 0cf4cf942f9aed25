"""Episodes of a run, token by token: the records that a run keeps, and the page that shows them.

    python -m copc_jax.viewer RUN_DIR [-o PAGE]

writes one HTML file that needs no server and loads nothing. A record is one line of episodes.jsonl:

    step              learner version after the update that trained on the episode
    trained_by        learner version before the batch; a token's lag is that minus its version
    prompt_id, sample, source, gold, answer
    reward, status    status is done, truncated or aborted
    lag               smallest and largest of the sampled tokens, in learner updates
    info              figures of the task
    parts             in order: {"by": "prompt" or "tool", "text"}, {"by": "policy", "tokens"}; a
                      token is null where a character that began in the token before it goes on
    tokens            figures of the sampled tokens in order, one list a name (see `record`)

Figures are frozen, as they were before the update, and rounded to four digits; null is not finite.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.resources
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from copc_jax.metrics import CONFIG_FILE, EPISODES_FILE, EPISODES_PAGE, read_metrics
from copc_jax.types import Prompt, Trajectory

# Methods whose actor loss trains on every sampled token, whatever its ratio.
UNMASKED = frozenset({"cispo", "reinforce", "retrace", "vcpo", "vtrace"})

# A UTF-8 character has at most four bytes, and a token of a byte-level vocabulary at least one.
_CHARACTER_TOKENS = 4


def record(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    figures: Mapping[str, np.ndarray],
    *,
    step: int,
    trained_by: int,
    prompt: Prompt | None = None,
    extract_answer: Callable[[Sequence[str]], str | None] = lambda turns: None,
) -> dict[str, Any]:
    """Return the record of one trained episode; the module says what is in it.

    Args:
        trajectory: the episode, with at least one sampled token.
        tokenizer: the policy's.
        figures: by name, [S] as the trajectory's arrays; what is not an action token is left out.
            The page knows policy_logprob, ratio, advantage (as the actor's loss reads it), value,
            value_target and gradient (the factor on the token's grad log pi, 0 where a mask or clip
            removed it); a name that a method does not have is absent.
        step: learner version after the update.
        trained_by: learner version before the first update on the episode's batch.
        prompt: what the episode answers, for its source and gold answers.
        extract_answer: takes the sampled texts, one a turn, and gives the answer in them, if any.
    """
    mask = trajectory.is_action
    versions = trajectory.weight_version[mask]
    parts: list[dict[str, Any]] = []
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), mask.size]
    for start, end in itertools.pairwise(edges):
        ids = trajectory.token_ids[start:end].tolist()
        if mask[start]:
            parts.append({"by": "policy", "tokens": token_texts(tokenizer, ids)})
        else:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            parts.append({"by": "prompt" if start == 0 else "tool", "text": text})
    turns = ["".join(t or "" for t in part["tokens"]) for part in parts if part["by"] == "policy"]
    tokens = {
        "token_id": trajectory.token_ids[mask].tolist(),
        "weight_version": versions.tolist(),
        "behavior_logprob": _rounded(trajectory.behavior_logprob[mask]),
        **{name: _rounded(values[mask]) for name, values in figures.items()},
    }
    return {
        "step": step,
        "trained_by": trained_by,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample,
        "source": prompt.source if prompt else "",
        "gold": list(prompt.gold) if prompt else [],
        "answer": extract_answer(turns),
        "reward": float(trajectory.reward),
        "status": trajectory.status,
        "lag": [int(trained_by - versions.max()), int(trained_by - versions.min())],
        "info": dict(
            zip(trajectory.info, _rounded(np.array([*trajectory.info.values()])), strict=True)
        ),
        "parts": parts,
        "tokens": tokens,
    }


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str | None]:
    """Return the text of each token, such that together they are the text of all.

    A character whose bytes lie in several tokens stands whole at the first of them; None stands for
    the others. Bytes that are no character become U+FFFD.
    """

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)

    texts: list[str | None] = []

    def settle(end: int) -> None:
        """Give the text of the tokens from the first open one to `end` to the first of them."""
        start = len(texts)
        # From the token before, because some decoders change the beginning of a text.
        before = max(start - 1, 0)
        whole, known = decode(before, end), decode(before, start)
        text = whole[len(known) :] if whole.startswith(known) else decode(start, end)
        texts.extend([text, *[None] * (end - start - 1)])

    for end in range(1, len(token_ids) + 1):
        start = len(texts)
        if end - start > 1 and decode(start, end) == decode(start, end - 1) + decode(end - 1, end):
            # The bytes do not join: what was open is no character.
            settle(end - 1)
            start = end - 1
        open_ = decode(start, end).endswith("\ufffd") and end - start < _CHARACTER_TOKENS
        if not open_ or end == len(token_ids):
            settle(end)
    return texts


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.4g}") if math.isfinite(x) else None for x in values.tolist()]


def write_page(run_dir: str | pathlib.Path, page: str | pathlib.Path | None = None) -> pathlib.Path:
    """Write the page of a run's episodes, by default into the run folder, and return its path.

    Raises:
        FileNotFoundError: the run recorded no episode.
        ValueError: a line of its files cannot be read.
    """
    run_dir = pathlib.Path(run_dir)
    rows = read_metrics(run_dir, EPISODES_FILE)
    episodes = [row for row in rows if "parts" in row]
    if not episodes:
        raise FileNotFoundError(f"{run_dir / EPISODES_FILE} holds no episodes: nothing to show")
    file = run_dir / CONFIG_FILE
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    curve = [
        [row["step"], row["reward/mean"]]
        for row in read_metrics(run_dir)
        if row.get("reward/mean") is not None
    ]
    method = config.get("method")
    names = [str(config[key]) for key in ("task", "method") if key in config]
    names += [f"{key} {config[key]}" for key in ("staleness", "seed") if key in config]
    data = {
        "title": ", ".join(names) or run_dir.resolve().name,
        "method": method,
        "unmasked": method in UNMASKED,
        "updates": max([row[0] for row in curve] + [episode["step"] for episode in episodes]),
        "curve": curve,
        "full_at": next((row["step"] for row in rows if "limit_bytes" in row), None),
        "episodes": episodes,
    }
    page = pathlib.Path(page) if page else run_dir / EPISODES_PAGE
    page.write_text(_html(data), encoding="utf-8")
    return page


def _html(data: Mapping[str, Any]) -> str:
    template = (importlib.resources.files("copc_jax") / "viewer.html").read_text(encoding="utf-8")
    # What an episode holds was sampled by a policy or came from a tool: no character of it may end
    # the element that it stands in, and nothing but the page's own script may run.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    sources = "; ".join(
        f"{kind}-src '{_digest(template, tag)}'"
        for kind, tag in (("script", "script"), ("style", "style"))
    )
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; {sources}"
    filled = {"{{policy}}": policy, "{{data}}": text}
    # One pass: a text that looks like a place to fill stays as it is.
    return re.sub(r"\{\{(?:policy|data)\}\}", lambda match: filled[match[0]], template)


def _digest(template: str, tag: str) -> str:
    content = re.search(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    assert content is not None, f"viewer.html has no <{tag}>"
    return "sha256-" + base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page of the run that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m copc_jax.viewer", description="Write the page of a run's episodes."
    )
    parser.add_argument("run_dir", type=pathlib.Path, help="folder of the run")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, help=f"page; by default {EPISODES_PAGE} in the run"
    )
    options = parser.parse_args(arguments)
    try:
        print(write_page(options.run_dir, options.output))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
