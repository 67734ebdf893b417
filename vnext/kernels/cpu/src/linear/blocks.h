/* The blocks of GGUF files, taken apart into codes and scales: what vnext/kernels/formats/gguf_blocks.py says of each type. */
#pragma once

#include <cstdint>

namespace vnx {

/* The types whose numbers are codes, by llama.cpp's names. BLOCKLESS: codes are given as they are. */
#define VNX_BLOCK_TYPES(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(TQ1_0) X(TQ2_0) X(IQ4_NL) X(IQ4_XS) X(MXFP4)
#define VNX_BLOCK_NAME(name) BLOCK_##name,
enum BlockType : int64_t { BLOCKLESS, VNX_BLOCK_TYPES(VNX_BLOCK_NAME) };
#undef VNX_BLOCK_NAME

/* A block's scales and lows: `parts` in rising order, of the kind that the weight's form names, and a float16 that they are multiplied
   by where it has spans. */
struct BlockNumbers {
    alignas(4) uint8_t parts[16], lows[16];
    alignas(2) uint8_t span[2], low_span[2];
};

/* Of 2 ** `inputs_log` inputs, 2 ** `group_log` of which share one of the parts. */
struct BlockReader {
    int inputs_log, group_log;
    int64_t bytes;
    /* 32 codes, those of inputs 32 * index on. */
    void (*codes)(const uint8_t *block, int64_t index, uint8_t *to);
    void (*numbers)(const uint8_t *block, BlockNumbers &to);
};

const BlockReader &block_reader(int64_t type);

}  // namespace vnx
