// What a CTA of a decoding kernel works on: pairs of blocks of 64 tokens. PAGE is a multiple of 64.

constexpr int LATENT = 512, DIM = 576, TOKENS = 64, TILE = 64 * 128;
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

// The first of a block's rows in the cache.
__device__ __forceinline__ int cache_row(const int* pages, int block) {
  constexpr int BLOCKS = PAGE / TOKENS;
  return pages[block / BLOCKS] * PAGE + block % BLOCKS * TOKENS;
}
