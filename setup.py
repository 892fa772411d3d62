from setuptools import find_packages, setup

setup(
    name="eagle_jax",
    version="0.1.0",
    description="EAGLE speculative decoding in JAX: train, draft, verify, losslessly",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["eagle_jax", "experiments", "configs"]),
    package_data={"experiments": ["data/*", "data/questions/*", "heads/*/*"]},
    install_requires=[
        "jax>=0.7",
        "flax>=0.10",
        "optax>=0.2.7",
        "orbax-checkpoint>=0.11",
        "numpy>=1.26",
        "absl-py>=2.1",
        "jaxtyping>=0.3",
        "safetensors>=0.4",
        "tokenizers>=0.20",
        "jinja2>=3.1",
        "gguf>=0.10",
        "rich>=13",
        "matplotlib>=3.8",
        "numba>=0.60",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "beartype>=0.19",
            "hypothesis>=6",
            "ruff>=0.12",
            "pyright",
        ],
        "hub": ["huggingface-hub"],
        "peers": ["torch", "transformers", "accelerate"],
        "tpu": ["jax[tpu]"],  # with the libtpu that this jax was tested with
    },
)
