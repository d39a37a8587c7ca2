"""The noise of coupled sampling, specified to the bit (design.md 2).

Noise row (seed, sample index, position) holds one Gumbel(0, 1) value for every target token id. Whoever
makes it, in Python, C++ or on a GPU, follows this text and gets the same bits.

1. Random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
   key     = (seed mod 2^32, seed div 2^32),
   counter = (token_id div 4, sample_index, position, 0x67756D62),
   k       = output word number (token_id mod 4), an integer in [0, 2^32).
   The last counter word is this use's tag ("gumb" in ASCII); other uses of Philox take another one.
2. u = (k + 0.5) * 2^-32, exact in fp64, in (0, 1).
3. g = nlog(nlog(u)) rounded to fp32 (nearest even), where nlog(x) is -ln(x) in fp64, computed as written
   here; every operation rounds to nearest even, none is fused (no FMA), none is reordered:
     b = the bits of x as a signed 64-bit integer
     e = (b - 0x3FE6A09E667F3BCD) >> 52            arithmetic shift; the constant is sqrt(1/2)
     m = the double whose bits are b - (e << 52)   so x = m * 2^e, m in [sqrt(1/2), sqrt(2))
     s = (m - 1) / (m + 1);   z = s * s
     r = N7;  r = r * z + N6;  r = r * z + N5;  ...;  r = r * z + N1;  r = r * z + (-2)
     nlog = ((e * -LN2_LO) + (r * s)) + (e * -LN2_HI)
   N1..N7 are fdlibm's Lg1..Lg7 with the sign changed (`_NEG_LG`), LN2_HI and LN2_LO are fdlibm's too, so
   that e * LN2_HI is exact. |error| of nlog is below 1e-15 relative; g lies in (-3.131, 22.875).

Nothing else enters: not the batch, the tree, the step, nor the number of tokens in a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.extension import extension

native: Any = extension()
"""The extension, which makes the same rows and choices quicker; None where it was not built."""

NoiseKey = tuple[int, int, int]
"""(seed, sample index, position): below 2^64, 2^32 and 2^32."""

_TAG = 0x67756D62
_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_LN2_HI = 6.93147180369123816490e-01
_LN2_LO = 1.90821492927058770002e-10
_NEG_LG = (
    -6.666666666666735130e-01,
    -3.999999999940941908e-01,
    -2.857142874366239149e-01,
    -2.222219843214978396e-01,
    -1.818357216161805012e-01,
    -1.531383769920937332e-01,
    -1.479819860511658591e-01,
)

# Tokens of one block of CPU work (its buffers stay in the second-level cache), elements of one on a GPU.
_CPU_BLOCK = 1 << 16
_GPU_BLOCK = 1 << 23


def gumbel(
    keys: Sequence[NoiseKey], num_tokens: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """[len(keys), num_tokens] fp32, the first `num_tokens` values of each key's row.

    Raises ValueError for a key out of range.
    """
    out = torch.empty(len(keys), num_tokens, dtype=torch.float32, device=device)
    if not out.numel():
        return out
    on_cpu = out.device.type == "cpu"
    if on_cpu and (native is not None or 2 * num_tokens > _CPU_BLOCK):
        _fill_on_cpu(keys, list(out), _scratch(num_tokens))
        return out
    words = np.arange(-(-num_tokens // 4), dtype=np.int64)[None]
    step = max(1, (_CPU_BLOCK if on_cpu else _GPU_BLOCK) // max(1, num_tokens))
    for low in range(0, len(keys), step):
        schedule = _schedule(keys[low : low + step])
        if on_cpu:
            g = torch.from_numpy(_gumbel64(np, words, schedule))
        else:
            there = out.device
            g = _gumbel64(torch, torch.from_numpy(words).to(there), torch.from_numpy(schedule).to(there))
        out[low : low + step] = g[:, :num_tokens]
    return out


def _fill_on_cpu(keys: Sequence[NoiseKey], out: Sequence[torch.Tensor], scratch: tuple[Any, ...]) -> None:
    """Write key i's row to out[i]. numpy, not torch: its 64-bit integer products are three times quicker."""
    for key, row in zip(keys, out, strict=True):
        if native is not None:
            _check(key)
            native.gumbel(*key, len(row), row.data_ptr())
            continue
        schedule = _schedule([key])
        for low in range(0, len(row), _CPU_BLOCK):
            high = min(low + _CPU_BLOCK, len(row))
            words = np.arange(low // 4, -(-high // 4), dtype=np.int64)[None]
            buffers = tuple(buffer[:, : 4 * words.shape[1]] for buffer in scratch)
            row.numpy()[low:high] = _gumbel64(np, words, schedule, buffers)[0, : high - low]


def _scratch(num_tokens: int) -> tuple[Any, ...]:
    """Buffers for `_gumbel64`, to keep: fresh ones cost as much in page faults as the arithmetic does."""
    shape = (1, 0 if native is not None else min(-(-num_tokens // 4) * 4, _CPU_BLOCK))
    return (np.empty(shape, np.int64), *(np.empty(shape, np.float64) for _ in range(4)))


# One recipe for numpy and torch, whose functions below have the same names and meanings: `xp` is either.


def _gumbel64(xp: Any, words: Any, schedule: Any, scratch: tuple[Any, ...] | None = None) -> Any:
    """g before rounding, [rows, 4 * w] fp64. words: [1, w] int64, token_id // 4; schedule: `_schedule`."""
    parts = list(schedule)
    result = philox(xp, (words, *parts[:3]), list(zip(parts[3::2], parts[4::2], strict=True)))
    if scratch is None:
        integers = xp.stack(result, -1).reshape(len(parts[0]), -1)
        scratch = (integers, *(xp.empty_like(integers, dtype=xp.float64) for _ in range(4)))
    *spare, u = scratch
    for i, word in enumerate(result):
        u[:, i::4] = word & _MASK
    u += 0.5
    u *= 2.0**-32
    return nlog(xp, nlog(xp, u, spare), spare)


def philox(xp: Any, counter: Sequence[Any], key: Sequence[Sequence[Any]]) -> list[Any]:
    """Philox4x32-10: four int64 arrays of 32-bit words, together broadcasting to [rows, n], to four such.

    key: for each round two arrays. Only the low 32 bits of a result count.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in key:
        # Products wrap modulo 2^64. Only the operands of the next product are cut to 32 bits: bits above
        # them are harmless in c1 and c3, which are only xored. While words are still the same along a row,
        # broadcasting computes them once.
        product0 = c0 * _MULTIPLIER_0
        product1 = c2 * _MULTIPLIER_1
        c0 = _xor(_xor(product1 >> 32, c1), k0)
        c0 &= _MASK
        c2 = _xor(_xor(product0 >> 32, c3), k1)
        c2 &= _MASK
        c1, c3 = product1, product0
    return [c0, c1, c2, c3]


def _xor(mine: Any, other: Any) -> Any:
    """mine ^ other, in `mine` where it has the room."""
    if mine.shape[0] < other.shape[0] or mine.shape[1] < other.shape[1]:
        return mine ^ other
    mine ^= other
    return mine


def nlog(xp: Any, x: Any, spare: Sequence[Any]) -> Any:
    """-ln(x) by the module's recipe, written over x; spare: one int64, three fp64 arrays of x's shape.

    Separate multiplications and additions: one kernel for both might fuse them on some machines, or in the
    body of a loop and not in its tail.
    """
    e, s, r, exponent = spare
    bits = x.view(xp.int64)
    xp.subtract(bits, _SQRT_HALF_BITS, out=e)
    e >>= 52
    exponent[...] = e
    e <<= 52
    bits -= e
    xp.subtract(x, 1.0, out=s)
    x += 1.0
    s /= x
    z = xp.multiply(s, s, out=x)
    xp.multiply(z, _NEG_LG[-1], out=r)
    for coefficient in _NEG_LG[-2::-1]:
        r += coefficient
        r *= z
    r -= 2.0
    r *= s
    xp.multiply(exponent, -_LN2_LO, out=s)
    s += r
    xp.multiply(exponent, -_LN2_HI, out=x)
    x += s
    return x


def round_keys(seeds: NDArray[np.uint64]) -> NDArray[np.int64]:
    """[rounds, 2, len(seeds)]: the two key words of each of Philox's rounds."""
    first = np.stack([seeds & np.uint64(_MASK), seeds >> np.uint64(32)]).astype(np.int64)
    steps = np.arange(_NUM_ROUNDS)[:, None, None] * np.array([[_WEYL_0], [_WEYL_1]])
    keys: NDArray[np.int64] = (first + steps) & _MASK
    return keys


def _check(key: NoiseKey) -> None:
    seed, sample_index, position = key
    if not (0 <= seed < 1 << 64 and 0 <= sample_index <= _MASK and 0 <= position <= _MASK):
        raise ValueError(f"noise key out of range: {key}")


def _schedule(keys: Sequence[NoiseKey]) -> NDArray[np.int64]:
    """[3 + 2 * rounds, rows, 1]: counter words 1 to 3, then the round keys."""
    for key in keys:
        _check(key)
    schedule = np.empty((3 + 2 * _NUM_ROUNDS, len(keys), 1), np.int64)
    schedule[0, :, 0] = [key[1] for key in keys]
    schedule[1, :, 0] = [key[2] for key in keys]
    schedule[2] = _TAG
    schedule[3:, :, 0] = round_keys(np.array([key[0] for key in keys], np.uint64)).reshape(-1, len(keys))
    return schedule


class NoiseCache:
    """Keeps recently used noise rows: draft and target, and all nodes of one depth, share theirs.

    num_tokens: the target's vocabulary size, padding included. max_rows: rows kept, least recently used
    go first; a step draws on one row for each request and depth, so fewer than that keeps none.
    """

    def __init__(
        self, num_tokens: int, device: torch.device | str | None = None, max_rows: int = 256
    ) -> None:
        self.num_tokens = num_tokens
        self._rows = torch.empty(max_rows, num_tokens, dtype=torch.float32, device=device)
        self._slots: OrderedDict[NoiseKey, int] = OrderedDict()
        self._scratch = _scratch(num_tokens) if self._rows.device.type == "cpu" else None

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._rows.device

    def rows(self, keys: Sequence[NoiseKey]) -> torch.Tensor:
        """[len(keys), num_tokens] fp32, a tensor of the caller's own."""
        distinct = list(dict.fromkeys(keys))
        if len(distinct) > len(self._rows):
            place = {key: i for i, key in enumerate(distinct)}
            return gumbel(distinct, self.num_tokens, self.device)[[place[key] for key in keys]]
        for key in distinct:
            if key in self._slots:
                self._slots.move_to_end(key)
        missing = [key for key in distinct if key not in self._slots]
        for key in missing:
            full = len(self._slots) == len(self._rows)
            self._slots[key] = self._slots.popitem(last=False)[1] if full else len(self._slots)
        if missing:
            try:
                self._fill(missing)
            except BaseException:
                self._slots.clear()  # a row that an interruption left half made must never be used
                raise
        index = torch.tensor([self._slots[key] for key in keys], dtype=torch.int64, device=self.device)
        return self._rows.index_select(0, index)

    def _fill(self, keys: Sequence[NoiseKey]) -> None:
        slots = [self._slots[key] for key in keys]
        if self._scratch is not None:
            _fill_on_cpu(keys, [self._rows[slot] for slot in slots], self._scratch)
        else:
            self._rows[slots] = gumbel(keys, self.num_tokens, self.device)
