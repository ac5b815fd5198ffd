"""A stream of a block, a layer or a model, in pieces."""

import torch


def in_pieces(module, x, sizes, state, *context, **options):
    """The outputs of a stream end to end, and the state after it; one token goes by a step."""
    outs = []
    for piece in x.split(sizes, 1):
        call = module.step if piece.shape[1] == 1 else module.stream
        out, state = call(piece, state, *context, **options)
        outs.append(out)
    return torch.cat(outs, 1), state
