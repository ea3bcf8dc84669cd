// What a CTA of `kernel.cu` works on, and what it multiplies.

constexpr int LATENT = 512, DIM = 576, TOKENS = 64, TILE = 64 * 128, TILES = DIM / 64, ROPE_TILE = TILES - 1;
constexpr int BLOCK = TILES * TILE, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int OWN_HEADS = HEADS < 64 ? HEADS : 64;

struct Problem {
  const int *pages, *lengths;
  u16* out;           // BF16 [rows, LATENT], or
  float *part, *lse;  // F32 [rows, splits, LATENT] and [rows, splits]
  int most_pages, q_tokens, splits, sequences;
  float scale, value_scale;
  __device__ __forceinline__ int tiles() const { return q_tokens * HEADS / OWN_HEADS; }
  __device__ __forceinline__ int pieces() const { return tiles() * splits * sequences; }
};

// 64 heads of one query, and the blocks begin .. end - 1 of its sequence, of which tokens from `limit` on are masked.
struct Piece {
  int sequence, split, row, begin, end, limit;
  __device__ __forceinline__ Piece(const Problem& p, int index) {
    const int tile = index % p.tiles(), query = tile * OWN_HEADS / HEADS;
    sequence = index / p.tiles() / p.splits, split = index / p.tiles() % p.splits;
    row = sequence * p.q_tokens * HEADS + tile * OWN_HEADS;
    const int length = p.lengths[sequence] - (p.q_tokens - 1 - query), blocks = max(length + TOKENS - 1, 0) / TOKENS;
    const int share = ((blocks + 1) / 2 + p.splits - 1) / p.splits * 2;
    begin = split * share, end = min(begin + share, blocks), limit = min(length, end * TOKENS);
  }
};

// Two BF16 -> two FP16, at most its largest number.
__device__ __forceinline__ u32 to_operands(u32 pair) {
  const float most = 65504.f, first = first_of(pair), second = second_of(pair);
  return operand_pair(fminf(fmaxf(first, -most), most), fminf(fmaxf(second, -most), most));
}

// Two E4M3 codes -> two FP16, exactly.
__device__ __forceinline__ u32 expanded(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)codes));
  return pair;
}

// Sixteen codes, the `index`-th of a tile (four a row), to where the matrix instructions look for them.
__device__ __forceinline__ void store_expanded(char* tile, int index, uint4 v) {
  const int line = index / 4, piece = index % 4 * 2;
  const uint4 low = make_uint4(expanded(v.x), expanded(v.x >> 16), expanded(v.y), expanded(v.y >> 16));
  const uint4 high = make_uint4(expanded(v.z), expanded(v.z >> 16), expanded(v.w), expanded(v.w >> 16));
  *(uint4*)(tile + line * 128 + ((piece ^ line % 8) << 4)) = low;
  *(uint4*)(tile + line * 128 + ((piece + 1 ^ line % 8) << 4)) = high;
}
