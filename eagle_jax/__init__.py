"""EAGLE speculative decoding in JAX: train a draft head, draft trees, verify losslessly.

Read the files in import order:

    config -> layers -> cache -> target -> tree -> draft -> verify -> decode
           -> train, metrics -> checkpoint -> jsonfile, tensorfile, torchfile
           -> modelconfig, weights, heads -> template, text, data -> experiments

Dimension letters, used in annotations and einsum strings everywhere:

    B  rows (prompts decoded together)       T  tokens fed to one forward
    S  cache slots                           R  positions a training loss looks at
    N  tree nodes verified, root included    W  tree width: nodes expanded per level
    M  depth + 1, the most tokens one step can emit
    D  model width        F  MLP width       E  feature width (taps * target width)
    H  query heads        K  K/V heads       G  H / K        C  channels per head
    V  target vocabulary  U  draft vocabulary

Activations are feature-major, `[D, B, T]`, and matrices are `[out, in]` as in published
checkpoints: one weight row times all tokens is one contiguous pass over the weights, which
on CPUs verifies 8 to 16 nodes in about half the time of the row-major form and compiles to
the same program on TPU.

Words: the *target* is the model whose output law is kept; the *draft* is the small head.
*Features* are the target's hidden states handed to the draft, *hidden* is the draft's own
output fed back as the next feature. The *root* is the newest emitted token, not yet run
through the target. `n_accepted` never counts the bonus token, `n_emitted` and tau do.
"""
