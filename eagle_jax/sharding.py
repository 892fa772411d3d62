"""Where every array lives when there is more than one device.

A mesh has two axes: rows of a batch are cut over `data`; K/V heads with their query heads,
MLP rows and the vocabulary over `model`. `TABLE` says it for every leaf of target, draft,
caches, batches and optimiser by the last name on its path. Placing the inputs decides the
whole program: XLA carries the placement through.

    data:2,model:2    rows 0-1            rows 2-3
    first half        device 0            device 2      heads, MLP rows, vocabulary
    second half       device 1            device 3
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from eagle_jax.config import DraftConfig, TargetConfig
from eagle_jax.layers import Int8, Params

T = TypeVar("T")
Model = TypeVar("Model", TargetConfig, DraftConfig)

# A leaf with more axes than its row here is a stack of such leaves, first axis uncut.
TABLE: dict[str, tuple[str | None, ...]] = {
    # Parameters. A product whose input is cut adds up partial sums: one all-reduce.
    "embed": ("model", None),
    "head": ("model", None),
    "wqkv": ("model", None, None, None),
    "bqkv": ("model", None, None),
    "wo": (None, "model"),
    "w_gate_up": (None, "model", None),
    "w_down": (None, "model"),
    "router": (None, None),
    "fc": (None, "model"),
    "fuse": (None, "model"),
    "fc_bias": (None,),
    "fc_norm": (None, None),
    "block": (None, None, None),
    "block_bias": (None, None),
    "draft_to_target": (None,),
    **dict.fromkeys(("attn_norm", "mlp_norm", "q_norm", "k_norm", "norm"), (None,)),
    **dict.fromkeys(("embed_norm", "hidden_norm", "input_norm"), (None,)),
    "ns_coeffs": (None,),  # of Muon
    # Caches and what else a decoding step carries.
    "k": ("data", "model", None, None),
    "v": ("data", "model", None, None),
    "hidden": (None, "data"),
    "history": ("data", None),
    **dict.fromkeys(("length", "root", "keys", "done", "healthy"), ("data",)),
    # Batches and features of training.
    **dict.fromkeys(("tokens", "segments", "positions", "mask"), ("data", None)),
    "read": (None, "data", None),
    "top": (None, "data", None),
    "raw": ("data", None, None),
}
HEADS = ("wqkv", "bqkv", "wo", "k", "v")


def make_mesh(text: str, devices: list[Any] | None = None) -> Mesh:
    """Makes a mesh from a text such as "data:4,model:2"; an axis left out has size 1.

    Raises:
      ValueError: another axis, or sizes that do not use every device.
    """
    sizes = {"data": 1, "model": 1}
    for part in text.split(","):
        axis, _, size = part.partition(":")
        if axis not in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(
                f"a mesh is data:SIZE,model:SIZE, such as data:4,model:2; got {text!r}"
            )
        sizes[axis] = int(size)
    devices = jax.devices() if devices is None else devices
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"mesh {text!r} needs {math.prod(sizes.values())} devices, there are "
            f"{len(devices)}; choose sizes whose product is {len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 2, devices=devices
    )


def default_mesh(n_devices: int, target: TargetConfig, draft: DraftConfig) -> str:
    """Chooses the largest `model` that divides heads, MLP and vocabulary of both models.

    One prompt at a time gains from `model` alone; what is left over goes to `data`.
    """
    model = math.gcd(
        n_devices,
        *(cfg.n_kv_heads for cfg in (target, draft) if cfg.d_model),
        *(n for cfg in (target, draft) for n in (cfg.d_model, cfg.d_mlp)),
        *(cfg.vocab_size for cfg in (target, draft)),
    )
    return f"data:{n_devices // model},model:{model}"


def spec(
    name: str, shape: tuple[int, ...], sizes: dict[str, int], fsdp: bool = False
) -> P:
    """Returns how one leaf is cut.

    Three kinds of leaves that do not divide stay whole instead, which changes no number:
    attention whose K/V heads do not divide `model` (`pad_heads` avoids it; `wo`, which
    reads all heads as one axis, may still divide), batches of
    fewer rows than `data` or other than a multiple, and what `fsdp` finds no axis for. The
    factors of an `Int8` have one for all inputs, which is never cut.

    Args:
      name: path of the leaf; its last part is looked up.
      sizes: of the mesh's axes.
      fsdp: cut matrices over `data` as well, on the first axis that is free and divides:
        every device then keeps a share of the parameters and the optimiser state.

    Raises:
      ValueError: a leaf that is not in the table, or a size that does not divide.
    """
    last = name.rpartition("/")[2]
    if last in Int8._fields:  # both are cut like the matrix
        last = name.rpartition("/")[0].rpartition("/")[2]
    cuts = list(_row(last, len(shape), name, shape))
    for axis, cut in enumerate(cuts):
        if cut is None or shape[axis] % sizes[cut] == 0:
            continue
        if name.endswith("/scale"):  # one factor for all inputs of an output
            cuts[axis] = None
            continue
        if cut == "model" and last not in HEADS:
            raise ValueError(
                f"{name} has shape {shape}, and its axis {axis} of size {shape[axis]} does "
                f"not divide over model:{sizes['model']}; choose a smaller model axis"
            )
        cuts[axis] = None
    if fsdp and len(shape) > 1 and "data" not in cuts:
        free = (
            i for i, n in enumerate(shape) if not cuts[i] and n % sizes["data"] == 0
        )
        axis = next(free, None)
        if axis is not None:
            cuts[axis] = "data"
    return P(*cuts)


def _row(
    last: str, n_axes: int, name: str, shape: tuple[int, ...]
) -> tuple[str | None, ...]:
    if n_axes == 0:
        return ()
    if last not in TABLE or n_axes < len(TABLE[last]):
        raise ValueError(
            f"no placement is known for {name or last} of shape {shape}; add a row to "
            f"sharding.TABLE"
        )
    row = TABLE[last]
    return (None,) * (n_axes - len(row)) + row


def _name(path: tuple[Any, ...]) -> str:
    """Returns the last name on a path: indices of lists and tuples do not count."""
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    return next((name for name in reversed(names) if isinstance(name, str)), "")


def padded(cfg: Model, n: int) -> Model:
    """Returns the sizes of a model after `pad_heads`."""
    n_kv_heads = cfg.n_kv_heads + -cfg.n_kv_heads % n
    n_heads = cfg.n_heads // cfg.n_kv_heads * n_kv_heads
    return dataclasses.replace(cfg, n_kv_heads=n_kv_heads, n_heads=n_heads)


def pad_heads(params: Params, cfg: Model, n: int) -> tuple[Model, Params]:
    """Adds zero heads until the K/V heads are a multiple of `n`, the size of `model`.

    A head of zeros has values of zero, so whatever it attends to, nothing changes. It is
    for weights that are only read, a target's or a draft head's in decoding: a head is
    trained and written in its own shape, its attention whole where it does not divide.
    Pad before you stack.
    """
    new = padded(cfg, n)
    missing = {"wo": (1, (new.n_heads - cfg.n_heads) * cfg.head_dim)}
    missing |= dict.fromkeys(("wqkv", "bqkv"), (0, new.n_kv_heads - cfg.n_kv_heads))

    def pad(path: tuple[Any, ...], leaf: Array) -> Array:
        axis, extra = missing.get(_name(path), (0, 0))
        widths = [(0, extra if i == axis else 0) for i in range(leaf.ndim)]
        return jnp.pad(leaf, widths) if extra else leaf

    return new, jax.tree_util.tree_map_with_path(pad, params)


def shardings(tree: Any, mesh: Mesh | AbstractMesh, fsdp: bool = False) -> Any:
    """Returns the placement of every leaf, in the shape of `tree`.

    Raises:
      ValueError: with all leaves that cannot be placed.
    """
    sizes, faults = dict(mesh.shape), []

    def place_leaf(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        at = jax.tree_util.keystr(path, simple=True, separator="/")
        name = at if _name(path[-1:]) else f"{at}/{_name(path)}"
        try:
            return NamedSharding(mesh, spec(name, leaf.shape, sizes, fsdp))
        except ValueError as fault:
            faults.append(str(fault))
            return NamedSharding(mesh, P())

    placed = jax.tree_util.tree_map_with_path(place_leaf, tree)
    if faults:
        raise ValueError("; ".join(faults))
    return placed


def place(tree: T, mesh: Mesh | AbstractMesh | None, fsdp: bool = False) -> T:
    """Moves arrays to where they belong; without a mesh nothing moves."""
    if mesh is None:
        return tree

    def move(leaf: Any, to: NamedSharding) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and jax.process_count() > 1:
            return jax.jit(lambda keys: keys, out_shardings=to)(leaf)
        return jax.device_put(leaf, to)

    return jax.tree.map(move, tree, shardings(tree, mesh, fsdp))


def to_host(tree: T) -> T:
    """Fetches arrays as NumPy ones, from the devices of other processes too.

    All processes must call it with the same arrays.
    """

    def fetch(leaf: Any) -> Any:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(fetch, tree)


def is_first() -> bool:
    """Tells whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def wait(for_what: str) -> None:
    """Lets every process come to this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(for_what)


def anywhere(flag: bool) -> bool:
    """Tells whether the flag is set in any process; all must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def constrain(tree: T, like: Any, fsdp: bool = False) -> T:
    """Says inside a jitted function where a result has to be: on the mesh of `like`."""
    mesh = mesh_of(like)
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh, fsdp))


def whole(x: Array) -> Array:
    """Keeps activations `[D, B, T]` whole over `model` inside a jitted function.

    Without it a matrix cut over its inputs, such as `fuse`, would cut the residual stream
    that it reads, and so cost an exchange at every norm and product of the target.
    """
    mesh = mesh_of(x)
    if mesh is None:
        return x
    free = NamedSharding(mesh, P(None, P.UNCONSTRAINED, None))
    return jax.lax.with_sharding_constraint(x, free)


def by_rows(
    add_up: Callable[[tuple[Any, ...], tuple[Any, ...]], T],
    own: tuple[Any, ...],
    row_axes: tuple[int, ...],
    shared: tuple[Any, ...],
) -> T:
    """Adds up something over the rows of a batch, each group of devices its own rows.

    For what gathers from everywhere in a batch: left to itself the compiler would bring all
    rows to all devices. Where rows do not divide over `data`, that is what happens.

    Args:
      add_up: gives sums over the rows in `own`; called once inside the jitted function.
      own: arrays (or None) with rows.
      row_axes: the axis of the rows in each of them.
      shared: what all groups read.
    """
    mesh = mesh_of(own)
    n_groups = mesh.shape["data"] if mesh else 1
    n_rows = own[0].shape[row_axes[0]]
    if n_groups == 1 or n_rows % n_groups:
        return add_up(own, shared)
    cut = tuple(P(*[None] * axis, "data") for axis in row_axes)
    summed = jax.shard_map(
        lambda own, shared: jax.lax.psum(add_up(own, shared), "data"),
        mesh=mesh,
        in_specs=(cut, P()),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    return summed(own, shared)


def largest(
    scores: Float[Array, "U B T"], k: int
) -> tuple[Float[Array, "B T X"], Int[Array, "B T X"]]:
    """Returns the k largest scores and where they stand; the first of equals comes first.

    Over a vocabulary that is cut, every device picks its own k first: left to itself the
    compiler would bring all scores together and sort them on every device.
    """
    mesh = mesh_of(scores)
    n_parts = mesh.shape["model"] if mesh else 1
    U, B, T = scores.shape
    if n_parts == 1 or U % n_parts or k > U // n_parts:
        best, index = jax.lax.top_k(scores.transpose(1, 2, 0), k)
        return best, index
    parts = scores.reshape(n_parts, -1, B, T).transpose(0, 2, 3, 1)
    best, index = jax.lax.top_k(parts, k)
    first = jnp.arange(0, U, U // n_parts, dtype=index.dtype)
    index = index + first[:, None, None, None]
    best, index = (
        whole(x.transpose(0, 3, 1, 2).reshape(-1, B, T)).transpose(1, 2, 0)
        for x in (best, index)
    )
    best, at = jax.lax.top_k(best, k)
    return best, jnp.take_along_axis(index, at, axis=-1)


def mesh_of(tree: Any) -> Mesh | AbstractMesh | None:
    """Returns the mesh on which `place` put arrays, None if it did not.

    Inside a jitted function it is the mesh of the arguments a value was made from.
    """
    for leaf in jax.tree.leaves(tree):
        where: Any = leaf.aval if isinstance(leaf, Tracer) else leaf
        where = where.sharding
        if isinstance(where, NamedSharding) and not where.mesh.empty:
            return where.mesh
    return None


def describe(mesh: Mesh | AbstractMesh | None) -> str:
    """Returns the text `make_mesh` would take."""
    sizes = dict(mesh.shape) if mesh else {"data": 1, "model": 1}
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items())
