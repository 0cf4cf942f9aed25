"""A server with SandboxFusion's wire format and scripted answers, for tests.

The first word of the code chooses the answer. Prints its port once it listens.
"""

import asyncio
import collections
import json

from aiohttp import web

TRACEBACK = """Traceback (most recent call last):
  File "/tmp/tmpy1/tmpz2.py", line 7, in <module>
    f(0)
  File "/tmp/tmpy1/tmpz2.py", line 3, in f
    return math.sqrt(x)
  File "/usr/lib/python3.11/fake.py", line 99, in sqrt
ValueError: math domain error
"""


def answer(status, run_status=None, stdout="", stderr="", code=0, message=""):
    run = run_status and {
        "status": run_status,
        "execution_time": 0.25,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
    }
    return web.json_response(
        {
            "status": status,
            "message": message,
            "compile_result": None,
            "run_result": run,
            "executor_pod_name": None,
            "files": {},
        }
    )


async def run_code(request):
    body = await request.json()
    scenario = body["code"].split()[0]
    tries = request.app["tries"]
    tries[body["code"]] += 1
    number = tries[body["code"]]
    match scenario:
        case "echo":
            return answer("Success", "Finished", json.dumps(body, sort_keys=True))
        case "success":
            return answer("Success", "Finished", "hi\n", "a warning\n")
        case "failed":
            return answer("Failed", "Finished", "before\n", TRACEBACK, code=1)
        case "memory":
            return answer("Failed", "Error", "", "Traceback ...\nMemoryError\n", code=1)
        case "silent":
            return answer("Failed", "Finished", None, None, code=9)
        case "time":
            return answer("Failed", "TimeLimitExceeded", "before\n", "")
        case "long":
            return answer("Success", "Finished", "é" * 1000)
        case "fault":
            return answer("SandboxError", message="no pod")
        case "garbage":
            return web.Response(text="<html>")
        case "shape":
            return web.json_response({"status": "Success", "run_result": None})
        case "unknown":
            return answer("Partial", "Finished")
        case "busy":  # Two time-outs of a gateway, then an answer.
            return web.Response(status=504) if number < 3 else answer("Success", "Finished", "late")
        case "504":
            return web.Response(status=504)
        case "500":
            return web.Response(status=500, text="boom")
        case "dropped":  # The connection breaks once.
            if number == 1:
                request.transport.abort()
            return answer("Success", "Finished", f"try {number}")
        case "count":
            return answer("Success", "Finished", str(tries[body["code"].split()[1]]))
        case "slow":
            await asyncio.sleep(0.2)
            return answer("Success", "Finished", body["code"].split()[1])
    raise AssertionError(scenario)


async def main():
    app = web.Application()
    app["tries"] = collections.Counter()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
