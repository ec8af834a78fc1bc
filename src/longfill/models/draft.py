"""The draft layer: from a row's hidden state and the token behind it to a guess of the token after that.

May import kernels and the files of `models/`. Invariant: a row is a function of the hidden states and tokens up to its
own position, as in the model; what it guesses decides how fast tokens come, never which.

Row i joins h_i, the model's hidden state behind its final norm, with the token t_(i+1):

    x_i = eh_proj [enorm(embed(t_(i+1))) ; hnorm(h_i)]        (the embedding counts as zero at position 0)
    y   = one decoder layer over x, with KV rows and index keys of its own
    z   = head_norm(y)
    t_(i+2) ~ head(z_i)

and where it guesses further, z_i stands in for h_(i+1), both being behind a norm, and the guess for its token.

Source: DeepSeek-V3's technical report, section 2.2, for the module; vLLM 0.33's deepseek_mtp.py for what one module
computes when it is used again for the tokens behind, and for position 0.

Suffixes: T rows of a block · O rows that the rank holds · C hidden · S rows that guess.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.models.decoder import Decoder
from longfill.models.rows import RankRows
from longfill.models.weights import MtpWeights


class DraftLayer:
    """A model's one layer behind the last, which runs over the model's pages with the model's kernels."""

    def __init__(self, decoder: Decoder, weights: MtpWeights) -> None:
        self._decoder = decoder
        self._weights = weights

    def forward(self, rows: RankRows, hidden_OC: Tensor) -> Tensor:
        """Run the rows, whose `token_ids_O` are the tokens *behind* their positions; writes the layer's caches.

        `hidden_OC` holds each row's h, or the z of the position before it where a guess goes on. It is overwritten and
        becomes the result: y [O, C], the residual stream without a norm.
        """
        decoder, step = self._decoder, self._decoder.block_rows
        positions_O = rows.attend.positions_T[rows.own]
        for first in range(0, hidden_OC.shape[0], step):
            span = slice(first, first + step)
            self._join(rows.token_ids_O[span], positions_O[span], hidden_OC[span])
        decoder.run_layers(decoder.config.num_layers, (self._weights.layer,), hidden_OC, rows)
        return hidden_OC

    def norm(self, y_SC: Tensor) -> Tensor:
        """z [S, C] of rows of y."""
        decoder = self._decoder
        return decoder.backend.rms_norm(y_SC, self._weights.head_norm, decoder.config.rms_norm_eps)

    def logits(self, z_SC: Tensor) -> Tensor | None:
        """fp32 [S, vocabulary]: what rows guess of the token two behind their position; None but on the first rank."""
        return self._decoder.head(z_SC, self._weights.head)

    def _join(self, token_ids_T: Tensor, positions_T: Tensor, hidden_TC: Tensor) -> None:
        """hidden = eh_proj [enorm(embedding) ; hnorm(hidden)]."""
        w, backend, eps = self._weights, self._decoder.backend, self._decoder.config.rms_norm_eps
        embedded_TC = F.embedding(token_ids_T, w.embed).masked_fill_((positions_T == 0)[:, None], 0)
        halves = backend.rms_norm(embedded_TC, w.enorm, eps), backend.rms_norm(hidden_TC, w.hnorm, eps)
        backend.linear(torch.cat(halves, -1), w.eh_proj, out=hidden_TC)
