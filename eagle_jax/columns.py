"""A matrix times a few columns for little more than the time of one, on CPUs.

Verifying a small tree multiplies every matrix of the target with 2 to 8 columns. That needs
no more memory traffic than one column, but XLA:CPU's product copies the matrix into another
order first. The kernel here reads each row where it lies, once. Numba compiles it; XLA
calls it through its foreign-function interface, and it works on XLA's own threads (another
pool's and XLA's take the cores from each other). Elsewhere, and for more columns,
`layers.linear` has XLA's product.

Every entry of the result is summed in the same order however many columns there are.
"""

import ctypes
import functools
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_COLUMNS = 8  # from 16 on XLA's product is as quick
MIN_WEIGHTS = (
    1 << 16
)  # smaller matrices lie in caches; one more thread for each as many
LANES, UNROLLED = 8, 2  # floats in a vector, vectors of a row in one turn of the loop
TILE_ROWS, TILE_COLUMNS = 2, 4  # eight sums of vectors, as many as hide the latency
ROWS_AHEAD = 4  # rows fetched while the ones before are multiplied
TASKS_PER_THREAD = 4  # a thread that wakes late leaves its share to the others
# Offsets below are those of this version of XLA's interface; another gets XLA's product.
TESTED_INTERFACE = (0, 3)


def suits(w: Float[Array, "F D"], x: Float[Array, "D M"]) -> bool:
    """Says whether `product` may be called: shapes, types, one CPU device, numba here.

    XLA cannot divide what it does not know: on several devices it would gather the matrix.
    """
    F, D = w.shape
    return (
        1 < x.shape[1] <= MAX_COLUMNS
        and w.dtype == x.dtype == jnp.float32
        and F % TILE_ROWS == 0
        and D % (LANES * UNROLLED) == 0
        and F * D >= MIN_WEIGHTS
        and jax.default_backend() == "cpu"
        and jax.device_count() == 1
        and jax.sharding.get_abstract_mesh().empty
        and register()
    )


@jax.custom_jvp
def product(w: Float[Array, "F D"], x: Float[Array, "D M"]) -> Float[Array, "F M"]:
    """Multiplies a matrix with a few columns; only where `suits` says so, and on a CPU."""
    F, M = len(w), x.shape[1]
    padding = -M % TILE_COLUMNS
    rows = jnp.pad(x.T, ((0, padding), (0, 0)))
    out = jax.ShapeDtypeStruct((F, M + padding), w.dtype)
    call = jax.ffi.ffi_call("eagle_columns", out, vmap_method="sequential")
    return call(w, rows)[:, :M]


@product.defjvp
def _derivative(
    primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (w, x), (dw, dx) = primals, tangents
    times = functools.partial(jnp.dot, precision="highest")
    return product(w, x), times(dw, x) + times(w, dx)


def register() -> bool:
    """Compiles the kernel and makes it known to XLA, once; False where that cannot be."""
    with _LOCK:
        return _register()


@functools.cache
def _register() -> bool:
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    version = tuple(
        int(number)
        for part in ("MAJOR", "MINOR")
        for number in re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header)
    )
    if version != TESTED_INTERFACE:
        return False
    try:
        from numba.core import config

        if getattr(config, "DISABLE_JIT", False):  # by $NUMBA_DISABLE_JIT
            return False
        compiled = _compile(re.findall(r"_API_STRUCT_FIELD\((\w+)\);", header))
    except ImportError:
        return False
    _KEPT.extend(compiled)
    kernel = jax.ffi.pycapsule(ctypes.c_void_p(compiled[1].address))
    jax.ffi.register_ffi_target("eagle_columns", kernel, "cpu")
    return True


_LOCK = threading.Lock()  # programs may be traced by several threads
# Machine code that XLA calls; it would be freed with its function.
_KEPT: list[Any] = []


def _compile(functions: list[str]) -> tuple[Any, Any]:
    """Returns what helping threads run, and the kernel.

    Numbers named `at_...` are addresses, in bytes. XLA's structures (xla/ffi/api/c_api.h)
    are read as 64-bit words.

    Args:
      functions: names in XLA's table of functions, which begins after six words.
    """
    from llvmlite import ir
    from numba import cfunc, njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    word, i32, f32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
    vector = ir.VectorType(f32, LANES)
    void, i64 = types.void, types.int64

    def of_plain(decorator: Any) -> Any:  # of functions whose types tests check, too
        return lambda function: decorator(inspect.unwrap(function))

    def pointer(b: Any, at: Any, to: Any = word) -> Any:
        return b.inttoptr(at, ir.PointerType(to))

    @of_plain(intrinsic)
    def load(_: Any, at: Any) -> Any:
        def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
            return b.load_atomic(pointer(b, a[0]), "acquire", 8)

        return i64(i64), emit

    @of_plain(intrinsic)
    def store(_: Any, at: Any, value: Any) -> Any:
        def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
            b.store(a[1], pointer(b, a[0]))
            return c.get_dummy_value()

        return void(i64, i64), emit

    @of_plain(intrinsic)
    def add(_: Any, at: Any, value: Any) -> Any:
        """Adds to a word that other threads add to; returns what it was."""

        def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
            return b.atomic_rmw("add", pointer(b, a[0]), a[1], "acq_rel")

        return i64(i64, i64), emit

    @of_plain(intrinsic)
    def call(_: Any, function: Any, at: Any) -> Any:
        def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
            return b.call(pointer(b, a[0], ir.FunctionType(word, [word])), [a[1]])

        return i64(i64, i64), emit

    @of_plain(intrinsic)
    def tile(_: Any, at_w: Any, at_x: Any, at_out: Any, D: Any, M: Any) -> Any:
        """Multiplies TILE_ROWS rows with TILE_COLUMNS columns, which lie as rows."""

        def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
            byte = ir.PointerType(ir.IntType(8))
            kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
            fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
            at_w, at_x, at_out, D, M = a
            row = b.mul(D, word(4))
            ahead = b.mul(row, word(ROWS_AHEAD))
            rows = [b.add(at_w, b.mul(row, word(r))) for r in range(TILE_ROWS)]
            columns = [b.add(at_x, b.mul(row, word(m))) for m in range(TILE_COLUMNS)]
            zero = ir.Constant(vector, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in columns] for _ in rows]

            def read(at: Any) -> Any:
                value = b.load(pointer(b, at, vector))
                value.align = 4
                return value

            turns = b.udiv(D, word(LANES * UNROLLED))
            with cgutils.for_range(b, turns) as loop:
                at = b.mul(loop.index, word(4 * LANES * UNROLLED))
                for r in rows:  # the turn is one cache line
                    there = b.inttoptr(b.add(b.add(r, ahead), at), byte)
                    b.call(fetch, [there, i32(0), i32(3), i32(1)])
                for step in range(UNROLLED):
                    here = b.add(at, word(4 * LANES * step))
                    weights = [read(b.add(r, here)) for r in rows]
                    for m, column in enumerate(columns):
                        value = read(b.add(column, here))
                        for weight, of_row in zip(weights, sums, strict=True):
                            fused = ("contract",)  # one rounding where there is fma
                            term = b.fmul(weight, value, flags=fused)
                            total = b.fadd(b.load(of_row[m]), term, flags=fused)
                            b.store(total, of_row[m])
            for r, of_row in enumerate(sums):
                for m, total in enumerate(of_row):
                    value = b.load(total)
                    for n in (LANES // 2, LANES // 4, LANES // 8):
                        turned = [(i + n) % LANES for i in range(LANES)]
                        turned = ir.Constant(ir.VectorType(i32, LANES), turned)
                        value = b.fadd(value, b.shuffle_vector(value, value, turned))
                    place = b.add(b.mul(M, word(r)), word(m))
                    there = b.add(at_out, b.mul(place, word(4)))
                    first = b.extract_element(value, i32(0))
                    b.store(first, pointer(b, there, f32))
            return c.get_dummy_value()

        return void(i64, i64, i64, i64, i64), emit

    malloc = types.ExternalFunction("malloc", i64(i64))
    free = types.ExternalFunction("free", void(i64))

    # A job: the next task, tasks done, threads that may still look at it; addresses of
    # matrix, columns and result; F, D, M and the number of tasks; arguments for XLA.
    @of_plain(njit(nogil=True))
    def work(job: int) -> None:
        """Does tasks until none is left; a thread that comes too late finds none."""
        at_w, at_x, at_out = load(job + 24), load(job + 32), load(job + 40)
        F, D, M = load(job + 48), load(job + 56), load(job + 64)
        n_tasks = load(job + 72)
        task = add(job, 1)
        while task < n_tasks:
            begin = F // TILE_ROWS * task // n_tasks * TILE_ROWS
            end = F // TILE_ROWS * (task + 1) // n_tasks * TILE_ROWS
            for row in range(begin, end, TILE_ROWS):
                for column in range(0, M, TILE_COLUMNS):
                    tile(
                        at_w + 4 * D * row,
                        at_x + 4 * D * column,
                        at_out + 4 * (M * row + column),
                        D,
                        M,
                    )
            add(job + 8, 1)
            task = add(job, 1)

    @of_plain(njit(nogil=True))
    def leave(job: int) -> None:
        if add(job + 16, -1) == 1:  # the last one
            free(job)

    @of_plain(cfunc(void(i64)))
    def help_with(job: int) -> None:
        work(job)
        leave(job)

    at_help = help_with.address
    at_schedule, at_count = (
        8 * (6 + functions.index(f"XLA_FFI_ThreadPool_{name}"))
        for name in ("Schedule", "NumThreads")
    )
    version = TESTED_INTERFACE[0] + (TESTED_INTERFACE[1] << 32)

    @of_plain(cfunc(i64(i64)))
    def kernel(frame: int) -> int:
        extension = load(frame + 8)
        if extension != 0:  # XLA asks for which version this was written
            store(load(extension + 24) + 24, version)
            return 0
        interface, context = load(frame + 16), load(frame + 24)
        arguments = load(frame + 72)
        w, x = load(arguments), load(arguments + 8)
        out = load(load(frame + 112))
        job = malloc(128)
        asked = job + 80
        store(asked, 32)  # the size of the structure
        store(asked + 8, 0)
        store(asked + 16, context)
        store(asked + 24, job)  # where the number goes
        store(job, 1)
        call(load(interface + at_count), asked)
        F, D = load(load(w + 40)), load(load(w + 40) + 8)
        n_threads = min(load(job), 1 + F * D // MIN_WEIGHTS)
        store(job, 0)
        store(job + 8, 0)
        store(job + 16, n_threads)
        store(job + 24, load(w + 24))
        store(job + 32, load(x + 24))
        store(job + 40, load(out + 24))
        store(job + 48, F)
        store(job + 56, D)
        store(job + 64, load(load(x + 40)))
        n_tasks = n_threads * TASKS_PER_THREAD
        store(job + 72, n_tasks)
        store(asked, 40)
        store(asked + 24, at_help)
        store(asked + 32, job)
        for _ in range(n_threads - 1):
            if call(load(interface + at_schedule), asked) != 0:
                leave(job)
        work(job)
        while load(job + 8) < n_tasks:  # others are at the last ones
            pass
        leave(job)
        return 0

    return help_with, kernel
