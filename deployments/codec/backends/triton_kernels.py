"""Triton kernels for the decoder on a GPU. There are few, large kernels, because launches dominate the time per frame.

Activations are [B, time, channels]. Streams are `stride` values apart, which leaves room for earlier rows before
each stream's first row. Kernels find a stream's state through its slot. `triton_decoder.py` launches the kernels,
and the tests compare them with plain PyTorch.
"""

import triton
import triton.language as tl

from deployments.gpu.launch import wait_for_predecessor


@triton.jit
def wave(x, frequency, amplitude):
    """Compute x [rows, n] + amplitude * sin(frequency * x)^2 with factors [n].

    tl.sin supports any angle and takes longer than the products. sin(r)^2 has a period of pi. For |r| <= pi / 2, a
    polynomial of r^2 approximates it within 7e-7.
    """
    angle = frequency[None, :] * x
    turns = tl.floor(angle * 0.3183098861837907 + 0.5)
    r = (angle - turns * 3.140625) - turns * 9.67653589793e-4  # pi is split in two parts for accuracy
    square = r * r
    sine = 1.1298744357191026e-4 * square - 3.1012322288006544e-3
    sine = sine * square + 4.435602203011513e-2
    sine = sine * square - 0.3332865238189697
    sine = sine * square + 0.9999919533729553
    return x + amplitude[None, :] * (sine * square)


@triton.jit(do_not_specialize=("streams", "time", "dilation"))
def conv_kernel(
    x, weight, gate_ptr, bias_ptr, residual_ptr, y_ptr, wave_ptr, frequency_ptr, amplitude_ptr,
    streams, time, num_in, num_out, num_wave, dilation, x_stride, out_stride, eps,
    taps: tl.constexpr, norm: tl.constexpr, gated: tl.constexpr, bias: tl.constexpr, gelu: tl.constexpr,
    residual: tl.constexpr, plain: tl.constexpr, snaked: tl.constexpr, precision: tl.constexpr, pdl: tl.constexpr,
    copied: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Compute y = x (through `taps` rows; 1 is a plain product) * weight + ..., then the operations of the flags.

    weight is [taps * in, out]. x begins with the rows before the first output row, [streams, context + time, in].
    `copied` reads x and weight, which then are tensor descriptors, with the copy engine (TMA) of Hopper GPUs. `norm`
    divides each input row by its root mean square. `gated` computes silu(x gate) * (x weight). `plain` stores the
    result. `snaked` stores result + amplitude * sin(frequency * result)^2, whose factors repeat every num_wave outputs.
    """
    first_out = tl.program_id(0) * block_n  # neighboring programs read the same rows
    n = first_out + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    if copied:  # a program's rows belong to one stream
        blocks = tl.cdiv(time, block_m)
        stream = tl.program_id(1) // blocks
        first_row = tl.program_id(1) % blocks * block_m
        row = first_row + tl.arange(0, block_m)
        row_ok = row < time
    else:
        m = tl.program_id(1) * block_m + tl.arange(0, block_m)
        stream, row = m // time, m % time
        row_ok = stream < streams
        here = x + stream * x_stride + row * num_in
    out_ok = n < num_out
    wait_for_predecessor(pdl)
    accumulator = tl.zeros((block_m, block_n), dtype=tl.float32)
    gate = tl.zeros((block_m, block_n), dtype=tl.float32)
    squares = tl.zeros((block_m,), dtype=tl.float32)
    steps = num_in // block_k
    for step in range(taps * steps):
        tap = step // steps if taps > 1 else 0
        first = (step - tap * steps) * block_k
        shift = tap * dilation
        weights = (step * block_k + k)[:, None] * num_out + n[None, :]
        if copied:
            a = x.load([stream, first_row + shift, first]).reshape(block_m, block_k)
            b = weight.load([step * block_k, first_out])
        else:
            source = here + shift * num_in + first
            a = tl.load(source[:, None] + k[None, :], mask=row_ok[:, None], other=0.0)
            b = tl.load(weight + weights, mask=out_ok[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=precision)
        if gated:
            g = tl.load(gate_ptr + weights, mask=out_ok[None, :], other=0.0)
            gate = tl.dot(a, g, gate, input_precision=precision)
        if norm:
            exact = a.to(tl.float32)
            squares += tl.sum(exact * exact, axis=1)
    if norm:
        scale = 1.0 / tl.sqrt(squares / num_in + eps)
        accumulator *= scale[:, None]
        if gated:
            gate *= scale[:, None]
    if gated:
        accumulator *= gate / (1.0 + tl.exp(-gate))
    if bias:
        accumulator += tl.load(bias_ptr + n, mask=out_ok, other=0.0)[None, :]
    if gelu:
        accumulator = 0.5 * accumulator * (1.0 + tl.erf(accumulator * 0.7071067811865476))
    places = (stream * out_stride + row * num_out)[:, None] + n[None, :]
    ok = row_ok[:, None] & out_ok[None, :]
    if residual:
        accumulator += tl.load(residual_ptr + places, mask=ok, other=0.0).to(tl.float32)
    if plain:
        tl.store(y_ptr + places, accumulator.to(y_ptr.dtype.element_ty), mask=ok)
    if snaked:
        frequency = tl.load(frequency_ptr + n % num_wave, mask=out_ok, other=0.0)
        amplitude = tl.load(amplitude_ptr + n % num_wave, mask=out_ok, other=0.0)
        tl.store(wave_ptr + places, wave(accumulator, frequency, amplitude).to(wave_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=("time",))
def remember_kernel(
    x_ptr, state_ptr, slots_ptr, time, context, channels, stride, state_stride,
    block_rows: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Copy state [slots, context, channels] to the rows before x, and replace it with the last `context` rows.

    x [B, context + time, channels] begins with the rows that this kernel fills.
    """
    wait_for_predecessor(pdl)
    stream = tl.program_id(0)
    c = tl.program_id(1) * block + tl.arange(0, block)
    rows = tl.arange(0, block_rows)
    x = x_ptr + stream * stride
    state = state_ptr + tl.load(slots_ptr + stream) * state_stride
    places = rows[:, None] * channels + c[None, :]
    ok = (rows < context)[:, None] & (c < channels)[None, :]
    old = tl.load(state + places, mask=ok, other=0.0)
    source = rows + time  # row of x, counted from the first context row
    last = tl.where(source < context, state + source * channels, x + source * channels)
    new = tl.load(last[:, None] + c[None, :], mask=ok, other=0.0)
    tl.debug_barrier()  # rows move within the state, so all reads must precede all writes
    tl.store(x + places, old, mask=ok)
    tl.store(state + places, new, mask=ok)


@triton.jit(do_not_specialize=("frames",))
def embed_kernel(
    ring_ptr, slots_ptr, positions_ptr, tables_ptr, y_ptr, frames, ring, codebook_size, channels, stride,
    groups: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Compute latents [B, frames, channels] as sums of codebook rows.

    A stream's frame p is at p % ring in ring [slots, ring, groups].
    """
    wait_for_predecessor(pdl)
    row = tl.program_id(0)
    c = tl.program_id(1) * block + tl.arange(0, block)
    slot = tl.load(slots_ptr + row // frames)
    position = tl.load(positions_ptr + slot) + row % frames
    codes = ring_ptr + (slot * ring + position % ring) * groups
    total = tl.zeros((block,), dtype=tl.float32)
    for group in range(groups):
        code = tl.load(codes + group).to(tl.int64)
        code = tl.minimum(tl.maximum(code, 0), codebook_size - 1)  # codes are arbitrary after an overflow
        entry = tables_ptr + (group * codebook_size + code) * channels
        total += tl.load(entry + c, mask=c < channels, other=0.0).to(tl.float32)
    place = y_ptr + row // frames * stride + row % frames * channels
    tl.store(place + c, total.to(y_ptr.dtype.element_ty), mask=c < channels)


@triton.jit(do_not_specialize=("frames",))
def attention_kernel(
    qkv_ptr, cache_ptr, slots_ptr, positions_ptr, y_ptr, frames, qkv_stride, y_stride, log_theta,
    heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, window: tl.constexpr, ring: tl.constexpr,
    block_frames: tl.constexpr, precision: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Compute sliding-window attention for one stream and head.

    New keys and values are stored in cache [slots, 2, kv_heads, ring, size]. qkv is [B, frames, (heads + 2 kv_heads) *
    size] before rotation, y is [B, frames, heads * size]. The key of frame p is at p % ring. Since ring >= window - 1
    + frames, overwritten frames lie outside all windows of this call.
    """
    stream, head = tl.program_id(0), tl.program_id(1)
    wait_for_predecessor(pdl)
    kv_head = head // (heads // kv_heads)
    slot = tl.load(slots_ptr + stream)
    begin = tl.load(positions_ptr + slot).to(tl.int32)
    half: tl.constexpr = size // 2
    width: tl.constexpr = (heads + 2 * kv_heads) * size
    f, d, r = tl.arange(0, block_frames), tl.arange(0, half), tl.arange(0, ring)
    ok = (f < frames)[:, None]
    angle = (begin + f)[:, None].to(tl.float32) * tl.exp(-log_theta * (2 * d).to(tl.float32) / size)[None, :]
    cosine, sine = tl.cos(angle), tl.sin(angle)
    rows = qkv_ptr + stream * qkv_stride + f[:, None] * width + d[None, :]
    query, key, value = rows + head * size, rows + (heads + kv_head) * size, rows + (heads + kv_heads + kv_head) * size
    first = tl.load(query, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(query + half, mask=ok, other=0.0).to(tl.float32)
    q1, q2 = first * cosine - second * sine, second * cosine + first * sine
    first = tl.load(key, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(key + half, mask=ok, other=0.0).to(tl.float32)
    kind = cache_ptr.dtype.element_ty
    k1, k2 = (first * cosine - second * sine).to(kind), (second * cosine + first * sine).to(kind)
    v1, v2 = tl.load(value, mask=ok, other=0.0).to(kind), tl.load(value + half, mask=ok, other=0.0).to(kind)
    q1, q2 = q1.to(kind), q2.to(kind)

    keys = cache_ptr + ((slot * 2 * kv_heads + kv_head) * ring) * size
    values = keys + kv_heads * ring * size
    places = r[:, None] * size + d[None, :]
    # Slot r of the ring holds the last frame before this call whose number is congruent to r modulo ring.
    number = begin - 1 - (begin - 1 - r + ring * 2) % ring
    valid = number >= 0
    old1 = tl.load(keys + places, mask=valid[:, None], other=0.0)
    old2 = tl.load(keys + half + places, mask=valid[:, None], other=0.0)
    scale = 1.0 / tl.sqrt(size * 1.0)
    past = tl.dot(q1, tl.trans(old1), input_precision=precision)
    past = tl.dot(q2, tl.trans(old2), past, input_precision=precision) * scale
    position = (begin + f)[:, None]
    past = tl.where(valid[None, :] & (number[None, :] > position - window), past, -1e30)
    new = tl.dot(q1, tl.trans(k1), input_precision=precision)
    new = tl.dot(q2, tl.trans(k2), new, input_precision=precision) * scale
    age = f[:, None] - f[None, :]  # distance in frames from the key to the query
    new = tl.where((age >= 0) & (age < window), new, -1e30)
    peak = tl.maximum(tl.max(past, axis=1), tl.max(new, axis=1))[:, None]
    past, new = tl.exp(past - peak), tl.exp(new - peak)
    total = (tl.sum(past, axis=1) + tl.sum(new, axis=1))[:, None]
    past, new = past.to(kind), new.to(kind)
    old1 = tl.load(values + places, mask=valid[:, None], other=0.0)
    old2 = tl.load(values + half + places, mask=valid[:, None], other=0.0)
    out = y_ptr + stream * y_stride + f[:, None] * (heads * size) + head * size + d[None, :]
    y1 = tl.dot(new, v1, tl.dot(past, old1, input_precision=precision), input_precision=precision) / total
    y2 = tl.dot(new, v2, tl.dot(past, old2, input_precision=precision), input_precision=precision) / total
    tl.store(out, y1.to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(out + half, y2.to(y_ptr.dtype.element_ty), mask=ok)
    # Several heads may share keys; the first of these heads writes them. The other heads never read the overwritten
    # entries in this call, because their `number` is older than any window.
    if head % (heads // kv_heads) == 0:
        target = ((begin + f) % ring)[:, None] * size + d[None, :]
        tl.store(keys + target, k1, mask=ok)
        tl.store(keys + half + target, k2, mask=ok)
        tl.store(values + target, v1, mask=ok)
        tl.store(values + half + target, v2, mask=ok)


@triton.jit(do_not_specialize=("time",))
def depthwise_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, time, channels, x_stride, y_stride, eps,
    taps: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Compute the depthwise convolution of one row, then normalize its channels to mean 0 and deviation 1.

    x [B, context + time, channels] begins with the rows before the first one.
    """
    wait_for_predecessor(pdl)
    stream, row = tl.program_id(0) // time, tl.program_id(0) % time
    c = tl.arange(0, block)
    ok = c < channels
    total = tl.load(bias_ptr + c, mask=ok, other=0.0)
    source = x_ptr + stream * x_stride + row * channels + c
    for tap in tl.static_range(taps):
        value = tl.load(source + tap * channels, mask=ok, other=0.0)
        total += value.to(tl.float32) * tl.load(weight_ptr + tap * channels + c, mask=ok, other=0.0)
    mean = tl.sum(tl.where(ok, total, 0.0), axis=0) / channels
    centred = tl.where(ok, total - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / channels
    target = y_ptr + stream * y_stride + row * channels + c
    tl.store(target, (centred / tl.sqrt(variance + eps)).to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=("num_rows", "time"))
def waveform_kernel(
    x_ptr, weight_ptr, bias_ptr, pcm_ptr, broken_ptr, num_rows, time, channels, stride, full_scale,
    taps: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Compute the last convolution, to one channel of clipped int16. Sets broken [B] to 1 for non-finite samples.

    x [B, context + time, channels] begins with the rows before the first one. The samples are [B * time].
    """
    wait_for_predecessor(pdl)
    m = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    c = tl.arange(0, block)
    row_ok = m < num_rows
    ok = row_ok[:, None] & (c < channels)[None, :]
    source = x_ptr + (m // time * stride + m % time * channels)[:, None] + c[None, :]
    total = tl.zeros((block_rows,), dtype=tl.float32)
    for tap in tl.static_range(taps):
        value = tl.load(source + tap * channels, mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + tap * channels + c, mask=c < channels, other=0.0)
        total += tl.sum(value * weight[None, :], axis=1)
    total += tl.load(bias_ptr)
    broken = (total != total) | (tl.abs(total) == float("inf"))  # NaN differs from itself
    tl.store(broken_ptr + m // time, 1, mask=row_ok & broken)
    scaled = tl.minimum(tl.maximum(total, -1.0), 1.0) * full_scale
    rounded = tl.floor(scaled + 0.5)  # rounding of ties is irrelevant at this accuracy
    tl.store(pcm_ptr + m, rounded.to(tl.int16), mask=row_ok)
