"""Triton kernels of the decoder on a GPU: few and large, since a frame is bound by launches.

Rows are [B * time, channels]; a stream's state is found through its slot, so that gathering and scattering state costs
no copies. `triton.py` launches them; the tests compare them with plain PyTorch.
"""

import triton
import triton.language as tl

from deployments.gpu.launch import wait_for_predecessor


@triton.jit
def wave(x, frequency, amplitude):
    """x [rows, n] + amplitude * sin(frequency * x)^2, whose factors are [n].

    tl.sin, which serves any angle, took longer than the products. sin(r)^2 for |r| <= pi / 2, to which its period of pi
    brings every angle, is a polynomial of r^2 within 7e-7.
    """
    angle = frequency[None, :] * x
    turns = tl.floor(angle * 0.3183098861837907 + 0.5)
    r = (angle - turns * 3.140625) - turns * 9.67653589793e-4  # pi in two parts
    square = r * r
    sine = 1.1298744357191026e-4 * square - 3.1012322288006544e-3
    sine = sine * square + 4.435602203011513e-2
    sine = sine * square - 0.3332865238189697
    sine = sine * square + 0.9999919533729553
    return x + amplitude[None, :] * (sine * square)


@triton.jit(do_not_specialize=("num_rows", "time", "dilation"))
def conv_kernel(
    x_ptr, state_ptr, slots_ptr, weight_ptr, gate_ptr, bias_ptr, residual_ptr, y_ptr,
    wave_ptr, frequency_ptr, amplitude_ptr,
    num_rows, time, num_in, num_out, num_wave, dilation, state_stride, eps,
    TAPS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    RESIDUAL: tl.constexpr, PLAIN: tl.constexpr, WAVE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x (through TAPS taps, TAPS = 1 is a plain product) * weight + ..., then the operations of the flags.

    weight is [TAPS * in, out]. Rows before the call's first come from state
    [slots, context, in], whose slots lie `state_stride` apart. NORM divides each
    input row by its root mean square, GATED makes silu(x gate) * (x weight), PLAIN stores the result, WAVE stores
    result + amplitude * sin(frequency * result)^2, whose factors repeat every num_wave outputs.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # neighbours read the same rows
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    wait_for_predecessor(PDL)
    row_ok, out_ok = m < num_rows, n < num_out
    context = (TAPS - 1) * dilation
    row = m % time
    if TAPS > 1:
        slot = tl.load(slots_ptr + m // time, mask=row_ok, other=0)
        remembered = state_ptr + slot * state_stride + row * num_in
    here = x_ptr + m * num_in
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    steps = num_in // BLOCK_K
    for step in range(TAPS * steps):
        if TAPS > 1:
            tap = step // steps
            first = (step - tap * steps) * BLOCK_K
            shift = tap * dilation
            back = context - shift  # how many rows before this one the tap looks at
            source = tl.where(row >= back, here - back * num_in, remembered + shift * num_in) + first
        else:
            source = here + step * BLOCK_K
        a = tl.load(source[:, None] + k[None, :], mask=row_ok[:, None], other=0.0)
        weights = (step * BLOCK_K + k)[:, None] * num_out + n[None, :]
        b = tl.load(weight_ptr + weights, mask=out_ok[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        if GATED:
            g = tl.load(gate_ptr + weights, mask=out_ok[None, :], other=0.0)
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
        if NORM:
            exact = a.to(tl.float32)
            squares += tl.sum(exact * exact, axis=1)
    if NORM:
        scale = 1.0 / tl.sqrt(squares / num_in + eps)
        accumulator *= scale[:, None]
        if GATED:
            gate *= scale[:, None]
    if GATED:
        accumulator *= gate / (1.0 + tl.exp(-gate))
    if BIAS:
        accumulator += tl.load(bias_ptr + n, mask=out_ok, other=0.0)[None, :]
    if GELU:
        accumulator = 0.5 * accumulator * (1.0 + tl.erf(accumulator * 0.7071067811865476))
    places = m[:, None] * num_out + n[None, :]
    ok = row_ok[:, None] & out_ok[None, :]
    if RESIDUAL:
        accumulator += tl.load(residual_ptr + places, mask=ok, other=0.0).to(tl.float32)
    if PLAIN:
        tl.store(y_ptr + places, accumulator.to(y_ptr.dtype.element_ty), mask=ok)
    if WAVE:
        frequency = tl.load(frequency_ptr + n % num_wave, mask=out_ok, other=0.0)
        amplitude = tl.load(amplitude_ptr + n % num_wave, mask=out_ok, other=0.0)
        tl.store(wave_ptr + places, wave(accumulator, frequency, amplitude).to(wave_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=("time",))
def remember_kernel(
    x_ptr, state_ptr, slots_ptr, time, context, channels, state_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """state [slots, context, channels] becomes the last `context` rows of (state, x), x being [B, time, channels]."""
    wait_for_predecessor(PDL)
    stream = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    state = state_ptr + tl.load(slots_ptr + stream) * state_stride
    source = rows + time  # among the remembered rows, then those of x
    old = tl.where(source < context, state + source * channels, x_ptr + (stream * time + source - context) * channels)
    ok = (rows < context)[:, None] & (c < channels)[None, :]
    values = tl.load(old[:, None] + c[None, :], mask=ok, other=0.0)
    tl.debug_barrier()  # rows move within the state: everything is read before anything is written
    tl.store(state + rows[:, None] * channels + c[None, :], values, mask=ok)


@triton.jit(do_not_specialize=("frames",))
def embed_kernel(
    ring_ptr, slots_ptr, positions_ptr, tables_ptr, y_ptr, frames, ring, codebook_size, channels,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Latents [B * frames, channels]: sums of codebook rows.

    A stream's frame p stands at p % ring in ring [slots, ring, GROUPS].
    """
    wait_for_predecessor(PDL)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row // frames)
    position = tl.load(positions_ptr + slot) + row % frames
    codes = ring_ptr + (slot * ring + position % ring) * GROUPS
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for group in range(GROUPS):
        code = tl.load(codes + group).to(tl.int64)
        code = tl.minimum(tl.maximum(code, 0), codebook_size - 1)  # where numbers overflowed, anything may stand
        entry = tables_ptr + (group * codebook_size + code) * channels
        total += tl.load(entry + c, mask=c < channels, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * channels + c, total.to(y_ptr.dtype.element_ty), mask=c < channels)


@triton.jit(do_not_specialize=("frames",))
def attention_kernel(
    qkv_ptr, cache_ptr, slots_ptr, positions_ptr, y_ptr, frames, log_theta,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    FRAMES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sliding-window attention of one stream and head.

    New keys and values go to cache [slots, 2, KV_HEADS, RING, SIZE]. qkv is [B * frames, (HEADS + 2 KV_HEADS) * SIZE]
    before rotation, y [B * frames, HEADS * SIZE]. The key of frame p stands at p % RING, and
    RING >= WINDOW - 1 + frames, so that what is overwritten has left every window of this call.
    """
    stream, head = tl.program_id(0), tl.program_id(1)
    wait_for_predecessor(PDL)
    kv_head = head // (HEADS // KV_HEADS)
    slot = tl.load(slots_ptr + stream)
    begin = tl.load(positions_ptr + slot).to(tl.int32)
    HALF: tl.constexpr = SIZE // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    f, d, r = tl.arange(0, FRAMES), tl.arange(0, HALF), tl.arange(0, RING)
    ok = (f < frames)[:, None]
    angle = (begin + f)[:, None].to(tl.float32) * tl.exp(-log_theta * (2 * d).to(tl.float32) / SIZE)[None, :]
    cosine, sine = tl.cos(angle), tl.sin(angle)
    rows = qkv_ptr + (stream * frames + f)[:, None] * WIDTH + d[None, :]
    query, key, value = rows + head * SIZE, rows + (HEADS + kv_head) * SIZE, rows + (HEADS + KV_HEADS + kv_head) * SIZE
    first, second = (
        tl.load(query, mask=ok, other=0.0).to(tl.float32),
        tl.load(query + HALF, mask=ok, other=0.0).to(tl.float32),
    )
    q1, q2 = first * cosine - second * sine, second * cosine + first * sine
    first, second = (
        tl.load(key, mask=ok, other=0.0).to(tl.float32),
        tl.load(key + HALF, mask=ok, other=0.0).to(tl.float32),
    )
    kind = cache_ptr.dtype.element_ty
    k1, k2 = (first * cosine - second * sine).to(kind), (second * cosine + first * sine).to(kind)
    v1, v2 = tl.load(value, mask=ok, other=0.0).to(kind), tl.load(value + HALF, mask=ok, other=0.0).to(kind)
    q1, q2 = q1.to(kind), q2.to(kind)

    keys = cache_ptr + ((slot * 2 * KV_HEADS + kv_head) * RING) * SIZE
    values = keys + KV_HEADS * RING * SIZE
    places = r[:, None] * SIZE + d[None, :]
    # Slot r of the ring holds the last frame before this call whose number is r modulo RING.
    number = begin - 1 - (begin - 1 - r + RING * 2) % RING
    valid = number >= 0
    old1 = tl.load(keys + places, mask=valid[:, None], other=0.0)
    old2 = tl.load(keys + HALF + places, mask=valid[:, None], other=0.0)
    scale = 1.0 / tl.sqrt(SIZE * 1.0)
    past = tl.dot(q1, tl.trans(old1), input_precision=PRECISION)
    past = tl.dot(q2, tl.trans(old2), past, input_precision=PRECISION) * scale
    position = (begin + f)[:, None]
    past = tl.where(valid[None, :] & (number[None, :] > position - WINDOW), past, -1e30)
    new = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    new = tl.dot(q2, tl.trans(k2), new, input_precision=PRECISION) * scale
    behind = f[:, None] - f[None, :]
    new = tl.where((behind >= 0) & (behind < WINDOW), new, -1e30)
    peak = tl.maximum(tl.max(past, axis=1), tl.max(new, axis=1))[:, None]
    past, new = tl.exp(past - peak), tl.exp(new - peak)
    total = (tl.sum(past, axis=1) + tl.sum(new, axis=1))[:, None]
    past, new = past.to(kind), new.to(kind)
    old1 = tl.load(values + places, mask=valid[:, None], other=0.0)
    old2 = tl.load(values + HALF + places, mask=valid[:, None], other=0.0)
    out = y_ptr + (stream * frames + f)[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
    y1 = tl.dot(new, v1, tl.dot(past, old1, input_precision=PRECISION), input_precision=PRECISION) / total
    y2 = tl.dot(new, v2, tl.dot(past, old2, input_precision=PRECISION), input_precision=PRECISION) / total
    tl.store(out, y1.to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(out + HALF, y2.to(y_ptr.dtype.element_ty), mask=ok)
    # Several heads may share keys; the first of them writes. Others never read these places in this call: `number`
    # of an overwritten place is older than every window.
    if head % (HEADS // KV_HEADS) == 0:
        target = ((begin + f) % RING)[:, None] * SIZE + d[None, :]
        tl.store(keys + target, k1, mask=ok)
        tl.store(keys + HALF + target, k2, mask=ok)
        tl.store(values + target, v1, mask=ok)
        tl.store(values + HALF + target, v2, mask=ok)


@triton.jit(do_not_specialize=("time",))
def depthwise_norm_kernel(
    x_ptr, state_ptr, slots_ptr, weight_ptr, bias_ptr, y_ptr, time, channels, state_stride, eps,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Depthwise convolution of one row, then mean 0 and deviation 1 over its channels."""
    wait_for_predecessor(PDL)
    m = tl.program_id(0)
    row = m % time
    c = tl.arange(0, BLOCK)
    ok = c < channels
    slot = tl.load(slots_ptr + m // time)
    total = tl.load(bias_ptr + c, mask=ok, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        if row >= back:
            value = tl.load(x_ptr + (m - back) * channels + c, mask=ok, other=0.0)
        else:
            value = tl.load(state_ptr + slot * state_stride + (row + tap) * channels + c, mask=ok, other=0.0)
        total += value.to(tl.float32) * tl.load(weight_ptr + tap * channels + c, mask=ok, other=0.0)
    mean = tl.sum(tl.where(ok, total, 0.0), axis=0) / channels
    centred = tl.where(ok, total - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / channels
    tl.store(y_ptr + m * channels + c, (centred / tl.sqrt(variance + eps)).to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=("num_rows", "time"))
def waveform_kernel(
    x_ptr, state_ptr, slots_ptr, weight_ptr, bias_ptr, pcm_ptr, broken_ptr,
    num_rows, time, channels, state_stride, full_scale,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last convolution, to one channel: int16, clipped. broken [B] becomes 1 where a sample is not finite."""
    wait_for_predecessor(PDL)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    row_ok = m < num_rows
    ok = row_ok[:, None] & (c < channels)[None, :]
    row = m % time
    slot = tl.load(slots_ptr + m // time, mask=row_ok, other=0)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        source = tl.where(
            row >= back, x_ptr + (m - back) * channels, state_ptr + slot * state_stride + (row + tap) * channels
        )
        value = tl.load(source[:, None] + c[None, :], mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + tap * channels + c, mask=c < channels, other=0.0)
        total += tl.sum(value * weight[None, :], axis=1)
    total += tl.load(bias_ptr)
    broken = (total != total) | (tl.abs(total) == float("inf"))  # NaN equals nothing
    tl.store(broken_ptr + m // time, 1, mask=row_ok & broken)
    scaled = tl.minimum(tl.maximum(total, -1.0), 1.0) * full_scale
    rounded = tl.floor(scaled + 0.5)  # halves never matter: the value is not exact to that
    tl.store(pcm_ptr + m, rounded.to(tl.int16), mask=row_ok)
