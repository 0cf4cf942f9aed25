"""What clients that others wrote get from a server, as JSON on standard output.

It runs in the environment of install_clients.py, with nothing of this project:

    python client_program.py frontend URL SETTINGS
    python client_program.py lm_eval URL SETTINGS
"""

import json
import sys


def frontend(url, prompts, choices, max_tokens):
    """SGLang's language: one prompt, a batch, a stream and a choice, and what its endpoint asks."""
    import sglang as sgl
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    endpoint = RuntimeEndpoint(url)
    sgl.set_default_backend(endpoint)

    @sgl.function
    def complete(s, prompt):
        s += prompt
        s += sgl.gen("answer", max_tokens=max_tokens, temperature=0, return_logprob=True)

    @sgl.function
    def choose(s, prompt):
        s += prompt
        s += sgl.gen("choice", choices=choices)

    single = complete.run(prompt=prompts[0])
    batch = complete.run_batch([{"prompt": prompt} for prompt in prompts])
    streaming = complete.run(prompt=prompts[0], stream=True)
    pieces = list(streaming.text_iter("answer"))
    choice = choose.run(prompt=prompts[0])
    found = {
        "model": endpoint.get_model_name(),
        "version": endpoint.get_server_info()["version"],
        "single": single["answer"],
        "meta_info": single.get_meta_info("answer"),
        "batch": [state["answer"] for state in batch],
        "pieces": pieces,
        "streamed": streaming.get_meta_info("answer"),
        "choice": choice["choice"],
        "choices": choice.get_meta_info("choice"),
    }
    # Only now: reading a state waits for it, and a cache in use cannot be flushed.
    endpoint.cache_prefix(prompts[0])
    endpoint.flush_cache()
    return found


def lm_eval(url, tokenizer, tasks, limit):
    """lm-eval on the tasks of a folder: what it scored, by task, and its metrics."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model="sglang-generate",
        model_args={
            "base_url": f"{url}/generate",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": limit,
        },
        tasks=["choose", "write"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
    )
    return {"samples": results["samples"], "results": results["results"]}


if __name__ == "__main__":
    program, url, settings = sys.argv[1:]
    # What the clients themselves print goes elsewhere.
    standard, sys.stdout = sys.stdout, sys.stderr
    found = {"frontend": frontend, "lm_eval": lm_eval}[program](url, **json.loads(settings))
    json.dump(found, standard, default=str)
