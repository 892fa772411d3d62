"""Chat templates, run where they can do no harm.

A template is downloaded code: even in jinja2's sandbox a few characters of it can loop
for ever or fill the memory. So it runs in a second process, this file, which has limits
on time and memory and is simply started again after it died. A rendering costs a tenth
of a millisecond more than in this process.
"""

import atexit
import contextlib
import datetime
import functools
import json
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

import jinja2
import jinja2.sandbox

SECONDS = 5.0  # of computing for one rendering, which takes milliseconds
BYTES = 512 << 20
MOST_CHARACTERS = 16 << 20

_lock = threading.Lock()
_worker: list[subprocess.Popen[str]] = []  # none or one


def render(template: str, variables: dict[str, Any]) -> str:
    """Returns what a template makes of `variables`, which must be JSON.

    Raises:
      ValueError: it is malformed, refuses the variables, or asks for too much.
    """
    request = json.dumps([SECONDS, template, variables])
    with _lock:
        worker = _started()
        assert worker.stdin and worker.stdout
        try:
            worker.stdin.write(request + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # an interrupt: its answer must not reach the next call
            _stop()
            raise
        if not answer.endswith("\n"):
            _stop()
            raise ValueError(
                f"the chat template takes more than {SECONDS:g} seconds or "
                f"{BYTES >> 20} MiB; give another template"
            )
    text, fault = json.loads(answer)
    if fault:
        raise ValueError(f"the chat template refuses these messages: {fault}")
    return text


def _started() -> subprocess.Popen[str]:
    if not _worker:
        # -P: the modules beside this file must not stand in for those of the library.
        command = [sys.executable, "-P", __file__]
        pipe = subprocess.PIPE
        quiet = subprocess.DEVNULL
        _worker.append(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        )
    return _worker[0]


@atexit.register
def _stop() -> None:
    while _worker:
        worker = _worker.pop()
        worker.kill()
        worker.communicate()


def _serve() -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
    # Where libtpu is loaded it is ignored, which a new process takes over.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    for line in sys.stdin:
        seconds, template, variables = json.loads(line)
        # SIGPROF is not caught: it ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            text = "".join(_pieces(template, variables))
            answer = [text, ""]
        except Exception as err:  # a template can raise anything
            answer = ["", f"{err!s:.300}" or type(err).__name__]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _pieces(template: str, variables: dict[str, Any]) -> list[str]:
    pieces, n = [], 0
    for piece in _compile(template).generate(variables):
        n += len(piece)
        if n > MOST_CHARACTERS:
            raise ValueError(f"it writes more than {MOST_CHARACTERS} characters")
        pieces.append(piece)
    return pieces


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    # The environment that published templates are written for (transformers
    # chat_template_utils.py).
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    _serve()
