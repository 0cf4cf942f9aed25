"""The page of episodes: what is kept of an episode, and what a person sees of it in a browser."""

import html.parser
import json
import pathlib
import random
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from copc_jax.losses import ratio_mask
from copc_jax.methods import METHODS, LossConfig
from copc_jax.metrics import MetricsLogger
from copc_jax.tasks.search import extract_answer
from copc_jax.types import Prompt, Trajectory
from copc_jax.viewer import UNMASKED, main, record, token_texts, write_page

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = (
    '</script><img src=x onerror="window.hit=1"><script>window.hit=1</script> \' & {{data}} '
    "\u2028\u2029\0\x1b[31m \u202eevil\u202c שלום 🙂 </ScRiPt\n<!-- {{policy}} -->\ttab\u200b"
)
WORDS = (" <search>", "capital", " of", " Peru", "</search>", " <answer>", "Lima", "</answer>")


def bytes_tokenizer() -> Tokenizer:
    """A byte-level vocabulary: 256 bytes and a few words, so that characters span tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([*WORDS])
    return tokenizer


TOKENIZER = bytes_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def episode(
    parts: list[str], *, reward=0.0, status="done", versions=(3,), prompt_id="q", info=None
) -> Trajectory:
    """Prompt, sampled and tool text in turn; versions change at equal shares of the tokens."""
    ids = [encode(part) for part in parts]
    mask = np.concatenate([np.full(len(x), i % 2 == 1) for i, x in enumerate(ids)])
    share = np.arange(mask.sum()) * len(versions) // max(mask.sum(), 1)
    version = np.full(mask.size, -1, np.int32)
    version[mask] = np.asarray(versions, np.int32)[share]
    return Trajectory(
        prompt_id=prompt_id,
        sample=0,
        token_ids=np.concatenate(ids).astype(np.int32),
        is_action=mask,
        behavior_logprob=np.where(mask, -0.5, 0.0).astype(np.float32),
        weight_version=version,
        reward=reward,
        status=status,
        info=info or {"turns": 2.0},
    )


def figures_of(trajectory: Trajectory, *, seed=0) -> dict[str, np.ndarray]:
    """Figures as a COPC update leaves them: a two-sided mask over ratios."""
    rng = np.random.default_rng(seed)
    size = trajectory.token_ids.size
    log_ratio = rng.normal(0, 0.25, size)
    ratio = np.exp(log_ratio)
    advantage = rng.normal(0, 1, size)
    kept = np.asarray(ratio_mask(jnp.asarray(ratio)))
    values = {
        "policy_logprob": trajectory.behavior_logprob + log_ratio,
        "ratio": ratio,
        "advantage": advantage,
        "value": rng.uniform(0, 2, size),
        "value_target": rng.uniform(0, 2, size),
        "gradient": np.where(kept, ratio * advantage, 0.0),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def write_run(folder: pathlib.Path, records: list[dict], *, method="copc") -> pathlib.Path:
    """Write a run folder around these records and return its page."""
    config = {"task": "search", "method": method, "staleness": 4, "seed": 0}
    with MetricsLogger(folder, console=False) as logger:
        for step in range(max(r["step"] for r in records) + 1):
            logger.log(step, {"reward/mean": 0.1 * step})
        for entry in records:
            logger.episode(entry)
    (folder / "config.json").write_text(json.dumps(config))
    return write_page(folder)


@pytest.mark.parametrize("text", ["Lima, 你好 🌍é\n\tx\0", "a\u202eb שלום", HOSTILE])
def test_characters_that_span_tokens_stand_whole_at_the_first(text):
    ids = encode(text)
    texts = token_texts(TOKENIZER, ids)
    assert len(texts) == len(ids)
    assert "".join(t or "" for t in texts) == text
    assert all(t is None or "\ufffd" not in t for t in texts)
    assert texts.count(None) == len(ids) - len([t for t in texts if t])


def test_tokens_that_are_no_text_stand_alone():
    first, second = encode("é")
    (letter,) = encode("a")
    assert token_texts(TOKENIZER, [first, letter]) == ["\ufffd", "a"]
    assert token_texts(TOKENIZER, [first, second, second]) == ["é", None, "\ufffd"]
    assert token_texts(TOKENIZER, []) == []
    rng = random.Random(0)
    for _ in range(100):
        ids = [rng.randrange(256) for _ in range(12)]
        texts = token_texts(TOKENIZER, ids)
        whole = TOKENIZER.decode(ids, skip_special_tokens=False)
        assert len(texts) == len(ids) and "".join(t or "" for t in texts) == whole


def test_a_record_holds_the_sampled_tokens_and_only_their_figures():
    sampled = [" <search>capital of Peru</search>", " <answer>Lima</answer>"]
    trajectory = episode(
        ["Capital?", sampled[0], "It is Lima.", sampled[1]],
        reward=2.0,
        versions=(3, 5),
        info={"turns": 2.0, "em": 1.0, "odd": float("nan")},
    )
    figures = {"ratio": np.full(trajectory.token_ids.size, np.nan, np.float32)}
    figures["ratio"][trajectory.is_action] = 1.23456789
    figures["ratio"][np.flatnonzero(trajectory.is_action)[0]] = np.inf
    prompt = Prompt(prompt_id="q", gold=("Lima",), source="1-hop")
    made = record(
        trajectory,
        TOKENIZER,
        figures,
        step=9,
        trained_by=8,
        prompt=prompt,
        extract_answer=extract_answer,
    )
    json.dumps(made, allow_nan=False)
    assert [part["by"] for part in made["parts"]] == ["prompt", "policy", "tool", "policy"]
    assert made["parts"][0]["text"] == "Capital?" and made["parts"][2]["text"] == "It is Lima."
    turns = ["".join(part["tokens"]) for part in made["parts"] if part["by"] == "policy"]
    assert turns == sampled
    count = int(trajectory.is_action.sum())
    assert {len(values) for values in made["tokens"].values()} == {count}
    assert made["tokens"]["ratio"] == [None] + [1.235] * (count - 1)
    assert made["tokens"]["token_id"] == trajectory.token_ids[trajectory.is_action].tolist()
    assert made["tokens"]["weight_version"][0] == 3 and made["tokens"]["weight_version"][-1] == 5
    assert (made["lag"], made["answer"], made["gold"]) == ([3, 5], "Lima", ["Lima"])
    assert (made["source"], made["reward"], made["info"]["odd"]) == ("1-hop", 2.0, None)


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_are_said_to_have_no_mask_train_on_every_token(name):
    """Ratios from 1/20 to 20 and advantages of both signs: a mask or clip drops some of them."""
    log_ratio = jnp.linspace(-3.0, 3.0, 16, dtype=jnp.float32)
    policy = jnp.tile(-4.0 + log_ratio, (2, 1))
    advantage = jnp.asarray([[1.0], [-1.0]], jnp.float32) * jnp.ones((2, 16), jnp.float32)
    _, metrics = METHODS[name].actor_loss(
        LossConfig(),
        policy,
        jnp.full((2, 16), -4.0, jnp.float32),
        policy,
        advantage,
        jnp.ones((2, 16), bool),
        reduce="token",
        segment_ids=jnp.tile(jnp.arange(1, 17, dtype=jnp.int32), (2, 1)),
    )
    kept, count = metrics["kept"]
    # With one update a batch a clip against the learner itself (TIS) drops nothing either.
    assert kept == count if name in UNMASKED else kept < count or name == "tis"


class Elements(html.parser.HTMLParser):
    """Tags, attributes that act, and the content of the data element, as a browser parses them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.active: list[str] = []
        self.data = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.active += [n for n, _ in attrs if n.startswith("on") or n in ("src", "href", "action")]
        self._open = dict(attrs).get("id", "") or ""

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open == "data":
            self.data += data


def hostile_records() -> list[dict]:
    trajectory = episode([HOSTILE, HOSTILE, HOSTILE, " <answer>" + HOSTILE], prompt_id=HOSTILE)
    prompt = Prompt(prompt_id="q", gold=(HOSTILE,), source=HOSTILE)
    return [
        record(trajectory, TOKENIZER, figures_of(trajectory), step=4, trained_by=3, prompt=prompt)
    ]


def test_no_text_of_an_episode_leaves_its_place(tmp_path):
    text = write_run(tmp_path, hostile_records()).read_text()
    found = Elements(text)
    assert found.tags.count("script") == 2 and "img" not in found.tags and not found.active
    assert json.loads(found.data)["episodes"] == hostile_records()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text and "unsafe" not in text


def test_a_tag_that_is_split_over_tokens_stays_text(tmp_path):
    attack = "<script>window.hit=1</script><img src=x onerror=window.hit=1>"
    trajectory = episode(["Question?", attack, "<iframe>", attack[::-1] + attack])
    figures = figures_of(trajectory)
    made = [record(trajectory, TOKENIZER, figures, step=4, trained_by=3)]
    (policy, _) = (part for part in made[0]["parts"] if part["by"] == "policy")
    assert policy["tokens"] == list(attack)
    found = Elements(write_run(tmp_path, made).read_text())
    assert found.tags.count("script") == 2 and not {"iframe", "img"} & {*found.tags}
    assert not found.active and json.loads(found.data)["episodes"] == made


def test_the_command_writes_the_page_or_says_why_not(tmp_path, capsys):
    run = tmp_path / "run"
    page = write_run(run, hostile_records())
    assert page == run / "episodes.html"
    main([str(run), "-o", str(tmp_path / "p.html")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == page.read_text()
    with pytest.raises(SystemExit, match="holds no episodes"):
        main([str(tmp_path)])


# --- In a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root, as in containers, has no sandbox.
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """Open a page file with the network cut; what the console says in the end fails the test."""
    said, opened = [], []

    def open_page(file: pathlib.Path, **settings):
        settings = {"viewport": {"width": 1280, "height": 800}} | settings
        context = browser.new_context(offline=True, **settings)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: opened.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert said == []
    assert all(url.startswith("file:") for url in opened)


def records() -> list[dict]:
    """Six updates of three episodes: reward, lag, finish and source differ."""
    made = []
    for step in range(10, 70, 10):
        for index in range(3):
            trajectory = episode(
                [
                    f"Question {step}.{index}?",
                    " <search>capital of Peru</search>",
                    "Peru: Lima",
                    " <answer>Lima\n</answer>" if index else " no 你 answer",
                ],
                reward=[0.0, 2.0, 1.1][index],
                status=["truncated", "done", "done"][index],
                versions=[(step - 5, step - 4), (step - 2,), (step - 1,)][index],
                prompt_id=f"{step}.{index}",
            )
            prompt = Prompt(prompt_id="", gold=("Lima",), source=["1-hop", "2-hop", "2-hop"][index])
            figures = figures_of(trajectory, seed=step + index)
            first = int(np.flatnonzero(trajectory.is_action)[0])
            for name, value in {"ratio": 1.9, "advantage": -2.5, "gradient": 0.0}.items():
                figures[name][first] = value
            for name, value in {"ratio": 0.9, "advantage": 2.5, "gradient": 2.25}.items():
                figures[name][first + 1] = value
            made.append(
                record(
                    trajectory, TOKENIZER, figures, step=step, trained_by=step - 1, prompt=prompt
                )
            )
    return made


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), records())


def background(page, index):
    """Computed red, green and blue (0 to 255) of a token, over white, as the screen shows it."""
    script = """(index) => {
        const style = getComputedStyle(document.querySelectorAll(".token")[index]);
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        canvas.fillStyle = "white"; canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = style.backgroundColor; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    }"""
    return np.asarray(page.evaluate(script, index))


def mode(page, name):
    page.get_by_role("radio", name=name, exact=True).check(force=True)


def facts(page):
    return dict(
        zip(
            page.locator("#facts dt").all_inner_texts(),
            page.locator("#facts dd").all_inner_texts(),
            strict=True,
        )
    )


def figures_shown(page):
    return dict(
        zip(
            page.locator("#figures dt").all_inner_texts(),
            page.locator("#figures dd").all_inner_texts(),
            strict=True,
        )
    )


def test_an_episode_is_read_turn_by_turn(visit, run_page):
    page = visit(run_page)
    assert page.title() == "Episodes: search, copc, staleness 4, seed 0"
    assert page.locator("#moment").inner_text() == "update 60 of 60"
    shown = facts(page)
    assert (shown["reward"], shown["answer"], shown["gold"]) == ("0", "none", "Lima")
    assert (shown["lag"], shown["finish"], shown["turns"]) == ("3 to 4", "truncated", "2")
    heads = page.locator(".part h3").all_inner_texts()
    assert [head.split(":")[0] for head in heads] == [
        "prompt",
        "policy, turn 1",
        "tool",
        "policy, turn 2",
    ]
    texts = [part.evaluate("e => e.textContent") for part in page.locator(".text").all()]
    assert texts == [
        "Question 60.0?",
        " <search>capital of Peru</search>",
        "Peru: Lima",
        " no 你 answer",
    ]
    # Prompt and tool text look different, and hold no token to point at.
    color = "e => getComputedStyle(e).color"
    seen = [part.evaluate(color) for part in page.locator(".text").all()]
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert page.locator(".prompt .token, .tool .token").count() == 0
    page.screenshot(path=run_page.with_name("page.png"))


def test_tokens_are_colored_by_each_figure(visit, run_page):
    page = visit(run_page, color_scheme="light")
    ratio_high, ratio_low = background(page, 0), background(page, 1)
    # 1.9 is near the end of the scale and red of blue is above; 0.9 is a faint blue.
    assert ratio_high[0] > ratio_high[2] + 60 and ratio_low[2] >= ratio_low[0] + 5
    assert ratio_low.min() > ratio_high.min()
    mode(page, "advantage")
    negative, positive = background(page, 0), background(page, 1)
    assert negative[2] > negative[0] + 60 and positive[0] > positive[2] + 60
    mode(page, "mask")
    assert "dropped" in page.locator(".token").nth(0).get_attribute("class")
    assert "kept" in page.locator(".token").nth(1).get_attribute("class")
    assert "linear-gradient" in page.locator(".token").nth(0).evaluate(
        "e => getComputedStyle(e).backgroundImage"
    )
    legend = page.locator("#key").inner_text()
    assert "trained on" in legend and "dropped by mask or clip" in legend
    mode(page, "version")
    assert not np.array_equal(
        background(page, 0), background(page, page.locator(".token").count() - 1)
    )
    assert "version 55, lag 4" in page.locator("#key").inner_text()
    mode(page, "value")
    low, high = (
        int(np.argmin(v))
        for s in (1, -1)
        for v in [s * np.asarray(records()[15]["tokens"]["value"])]
    )
    assert background(page, high).sum() < background(page, low).sum() - 60
    page.keyboard.press("6")
    assert page.get_by_role("radio", name="gradient").is_checked()
    assert np.array_equal(background(page, 0), [255, 255, 255])
    # Whatever the coloring, a dropped token is marked.
    assert "underline" in page.locator(".token").nth(0).evaluate(
        "e => getComputedStyle(e).textDecorationLine"
    )


def test_the_figures_of_a_token_are_shown(visit, run_page):
    page = visit(run_page)
    page.locator(".token").nth(0).hover()
    shown = figures_shown(page)
    assert (shown["ratio"], shown["advantage"], shown["trained on"]) == ("1.9", "-2.5", "dropped")
    assert (shown["version"], shown["lag"], shown["learner log-prob"] != "") == ("55", "4", True)
    page.locator(".token").nth(1).click()
    page.mouse.move(2, 2)
    assert figures_shown(page)["gradient factor"] == "2.25"
    page.keyboard.press("ArrowLeft")
    assert figures_shown(page)["ratio"] == "1.9"
    page.keyboard.press("ArrowDown")
    assert page.locator("#figures dt").count() == 0


def test_filters_and_training_time(visit, run_page):
    page = visit(run_page)
    count = lambda: page.locator("#matches").inner_text()
    listed = lambda: page.locator("#list button").count()
    assert (count(), listed()) == ("18 of 18 episodes", 3)
    page.keyboard.press("[")
    assert page.locator("#moment").inner_text() == "update 50 of 60"
    assert facts(page)["prompt"] == "50.0, sample 0"
    page.get_by_role("button", name="Earlier update").click()
    assert page.locator("#moment").inner_text() == "update 40 of 60"
    page.locator("#time").fill("0")
    assert page.locator("#moment").inner_text() == "update 10 of 60"
    assert page.get_by_role("button", name="Earlier update").is_disabled()
    # The last episode of an update is followed by the first of the next one.
    for _ in range(3):
        page.keyboard.press("j")
    assert facts(page)["prompt"] == "20.0, sample 0"
    page.keyboard.press("k")
    assert facts(page)["prompt"] == "10.2, sample 0"
    page.locator("#reward").select_option("positive")
    assert (count(), listed()) == ("12 of 18 episodes", 2)
    page.locator("#lag-low").fill("1")
    assert (count(), facts(page)["reward"], facts(page)["lag"]) == ("6 of 18 episodes", "2", "1")
    page.get_by_role("button", name="Reset").click()
    page.locator("#status").select_option("truncated")
    assert count() == "6 of 18 episodes" and facts(page)["finish"] == "truncated"
    page.locator("#source").select_option("2-hop")
    assert count() == "0 of 18 episodes"
    assert page.get_by_text("No episode matches the filters.").is_visible()
    assert not page.locator("#episode").is_visible()
    page.get_by_role("button", name="Reset").click()
    page.locator("#reward-low").fill("1.5")
    page.locator("#time").focus()
    page.keyboard.press("]")
    assert count() == "6 of 18 episodes" and facts(page)["reward"] == "2"
    box = page.locator("#chart").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    assert page.locator("#moment").inner_text() == "update 30 of 60"
    line = page.locator("#now")
    assert float(line.get_attribute("x1")) == pytest.approx(500, abs=1)


def test_hostile_text_is_shown_and_does_nothing(visit, tmp_path):
    page = visit(write_run(tmp_path, hostile_records()))
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    shown = page.locator(".policy .text").first.evaluate("e => e.textContent")
    hidden = re.compile("[\x00-\x08\x0b-\x1f\u2028-\u202e\u200b]")
    assert shown == hidden.sub("", HOSTILE)
    signs = page.locator(".policy .text").first.locator(".sign.code")
    names = [sign.get_attribute("data-sign") for sign in signs.all()]
    for name in ("U+0000", "U+001B", "U+202E", "U+2028", "U+200B"):
        assert name in names
    assert HOSTILE.split("\u2028")[0].strip() in facts(page)["gold"]
    assert "\u202e" not in page.locator("body").evaluate("e => e.innerText")


@pytest.mark.parametrize("method", ["reinforce", "dapo"])
def test_methods_without_a_critic_or_a_mask_say_so(visit, tmp_path, method):
    trajectory = episode(["Question?", " <answer>Lima</answer>"])
    figures = figures_of(trajectory)
    figures = {name: figures[name] for name in ("ratio", "policy_logprob")}
    flat = np.full(trajectory.token_ids.size, 0.0 if method == "dapo" else 0.5, np.float32)
    figures |= {"advantage": flat, "gradient": flat}
    made = record(trajectory, TOKENIZER, figures, step=4, trained_by=3)
    page = visit(write_run(tmp_path, [made], method=method))
    assert page.get_by_role("radio", name="value").is_disabled()
    page.keyboard.press("2")
    legend = page.locator("#key").inner_text()
    if method == "reinforce":
        assert "reinforce has no mask: it trains on every sampled token." in legend
    else:
        assert "advantage 0, no gradient: 100.0%" in legend
    page.locator(".token").nth(0).hover()
    assert "value" not in figures_shown(page)
    assert facts(page)["gold"] == "not recorded"


def test_themes_are_readable(visit, run_page):
    """Text and its background differ in luminance by 4.5 to 1 or more, as WCAG asks of text."""
    for scheme in ("light", "dark"):
        page = visit(run_page, color_scheme=scheme)
        for name in ("ratio", "mask", "advantage", "value", "version", "gradient"):
            mode(page, name)
            worst = page.evaluate(
                """() => {
                    const settings = {willReadFrequently: true};
                    const canvas = new OffscreenCanvas(1, 1).getContext("2d", settings);
                    const ground = getComputedStyle(document.body).backgroundColor;
                    const light = (...layers) => {
                        for (const layer of layers) {
                            canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1);
                        }
                        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => {
                            const c = x / 255;
                            return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
                        });
                        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                    };
                    return Math.min(...[...document.querySelectorAll(".token")].map((token) => {
                        const style = getComputedStyle(token);
                        const [a, b] = [light(style.color), light(ground, style.backgroundColor)];
                        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                    }));
                }"""
            )
            assert worst >= 4.5, (scheme, name)


def test_many_and_long_episodes_open(visit, tmp_path):
    short, long = (
        record(trajectory, TOKENIZER, figures_of(trajectory), step=0, trained_by=4)
        for trajectory in (episode(["Question?", "y" * 200]), episode(["Question?", "x " * 4000]))
    )
    made = [short | {"step": index // 10} for index in range(999)] + [long | {"step": 99}]
    page = visit(write_run(tmp_path, made))
    assert page.locator("#matches").inner_text() == "1000 of 1000 episodes"
    assert page.locator("#list button").count() == 10
    page.locator("#list button").last.click()
    assert page.locator(".token").count() == 8000
    mode(page, "value")
    page.keyboard.press("k")
    assert page.locator(".token").count() == 200
