/* Steady frames: a commit and a plan as expected, written as msgpack. Shared by _log.c and _open_blocks.c; see log_plain.py. */

#ifndef STEADY_FRAME_H
#define STEADY_FRAME_H

#include "compiled.h"
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the log is little-endian"
#endif

enum { FRAME_HEAD = 16, WIDTH_MIN = 2, WIDTH_MAX = 4, ARRIVED = 1, ABORTED = 2, PLANNED = 3, COMMITTED = 4,
       STEADY_OVERHEAD_MAX = 64 };

/* Whether every token fits `width` bytes. */
static int fits(const uint8_t *tokens, Py_ssize_t count, int width) {
    uint32_t all = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        uint32_t token;
        memcpy(&token, tokens + 4 * i, sizeof token);
        all |= token;
    }
    return width >= WIDTH_MAX || all >> 8 * width == 0;
}

/* Tokens that fit `width` bytes, as so many each. Three bytes go two tokens at a time, the next two over the surplus. */
static void pack(uint8_t *out, const uint8_t *tokens, Py_ssize_t count, int width) {
    Py_ssize_t i = 0;
    if (width == WIDTH_MAX) memcpy(out, tokens, 4 * count);
    for (uint64_t two; width == 3 && i + 3 <= count; i += 2) {
        memcpy(&two, tokens + 4 * i, sizeof two);
        two = (two & 0xffffff) | two >> 32 << 24;
        memcpy(out + 3 * i, &two, sizeof two);
    }
    for (; width < WIDTH_MAX && i < count; ++i) memcpy(out + width * i, tokens + 4 * i, width == 3 ? 3 : 2);
}

static int known_width(int width) {
    if (width >= WIDTH_MIN && width <= WIDTH_MAX) return 1;
    PyErr_Format(PyExc_ValueError, "%d bytes a token", width);
    return 0;
}

static uint8_t *put_big(uint8_t *out, uint8_t head, uint64_t value, int bytes) {
    *out++ = head;
    for (int byte = bytes - 1; byte >= 0; --byte) *out++ = (uint8_t)(value >> 8 * byte);
    return out;
}

/* An unsigned number in msgpack's shortest form: at most 9 bytes. */
static uint8_t *put_uint(uint8_t *out, uint64_t value) {
    if (value < 0x80) return put_big(out, (uint8_t)value, 0, 0);
    if (value <= 0xff) return put_big(out, 0xcc, value, 1);
    if (value <= 0xffff) return put_big(out, 0xcd, value, 2);
    if (value <= 0xffffffff) return put_big(out, 0xce, value, 4);
    return put_big(out, 0xcf, value, 8);
}

static uint8_t *put_bin_head(uint8_t *out, uint64_t size) {
    if (size <= 0xff) return put_big(out, 0xc4, size, 1);
    if (size <= 0xffff) return put_big(out, 0xc5, size, 2);
    return put_big(out, 0xc6, size, 4);
}

/* `frame` (a bytearray) becomes FRAME_HEAD bytes for seal_frame and the body
   [first event, [[4, step, tokens], [3, step, [], [], []]], [], 0, width]. 1: done, 0: a token does not fit, -1: an error. */
static int put_steady_frame(PyObject *frame, uint64_t first, uint64_t committed, const void *tokens, Py_ssize_t count,
                            uint64_t planned, int width) {
    Py_ssize_t size = count * width;
    if (!known_width(width)) return -1;
    if (!fits(tokens, count, width)) return 0;
    if (PyByteArray_Resize(frame, FRAME_HEAD + STEADY_OVERHEAD_MAX + size) < 0) return -1;
    uint8_t *start = (uint8_t *)PyByteArray_AS_STRING(frame), *out = start + FRAME_HEAD;
    memset(start, 0, FRAME_HEAD);
    *out++ = 0x95;
    out = put_uint(out, first);
    *out++ = 0x92, *out++ = 0x93, *out++ = COMMITTED;
    out = put_bin_head(put_uint(out, committed), size);
    pack(out, tokens, count, width);
    out += size;
    *out++ = 0x95, *out++ = PLANNED;
    out = put_uint(out, planned);
    *out++ = 0x90, *out++ = 0x90, *out++ = 0x90, *out++ = 0x90, *out++ = 0, *out++ = (uint8_t)width;
    return PyByteArray_Resize(frame, out - start) < 0 ? -1 : 1;
}

#endif
