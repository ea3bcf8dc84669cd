// What a CTA of `sm90_kernel.cu` works on.

constexpr int ROWS = 128, KEYS = 128, TILE = 128 * 128, Q_TILES = 3, V_TILES = 2, VALUES = 64 * V_TILES;
constexpr int STAGES = 2, CONSUMERS = 256, THREADS = CONSUMERS + 128;

struct Problem {
  const int *cu_q, *cu_k;
  u16* out;    // BF16 [rows of all sequences, heads, VALUES]
  float* lse;  // F32 [heads, rows of all sequences]
  int* taken;  // how many pieces beyond the CTAs' first were taken, 0 before; or null: they are taken in turns
  int sequences, heads, rows;
  float scale;  // of scores in powers of two
};

// Columns from one head to the next of queries, the first 128 of keys, their last 64 (0: all heads have the same), and values.
struct Columns { int q, key, rope, value; };

// ROWS queries of a head, the first `rows` of which are there, and its keys from `k_row` on, of which they see `seen` at most.
struct Piece {
  int head, q_row, rows, k_row, seen, blocks;
  int offset;  // query i of these sees the first offset + 1 + i keys
};

// The pieces of all sequences in turn. A sequence's are ordered so that some heads, whose keys and values fit into the L2, are
// done before others begin, and among them the longest first. Where these are not enough for all CTAs, a wave of CTAs ends with a
// group of heads, so that all who read a head's keys read them at a time.
struct Walk {
  int sequence = 0, base = 0;

  __device__ __forceinline__ bool find(const Problem& p, int index, Piece& piece) {
    for (; sequence < p.sequences; ++sequence) {
      const int q_row = p.cu_q[sequence], queries = p.cu_q[sequence + 1] - q_row, tiles = (queries + ROWS - 1) / ROWS;
      if (index - base < tiles * p.heads) {
        const int k_row = p.cu_k[sequence];
        place(p, index - base, tiles, q_row, queries, k_row, p.cu_k[sequence + 1] - k_row, piece);
        return true;
      }
      base += tiles * p.heads;
    }
    return false;
  }

  static __device__ __forceinline__ void place(const Problem& p, int index, int tiles, int q_row, int queries, int k_row, int keys,
                                               Piece& piece) {
    const int most = min(p.heads, max(1, L2_BYTES / (max(keys, 1) * 2 * (64 * Q_TILES + VALUES))));
    const int wave = max(1, (int)gridDim.x / tiles), whole = most < min(wave, p.heads) ? wave : p.heads;
    const int groups = (whole + most - 1) / most, fit = (whole + groups - 1) / groups;
    const int group = index / (tiles * fit), heads = min(fit, p.heads - group * fit), inside = index - group * tiles * fit;
    const int first = (tiles - 1 - inside / heads) * ROWS;
    piece.head = group * fit + inside % heads;
    piece.q_row = q_row + first, piece.k_row = k_row, piece.rows = min(ROWS, queries - first);
    piece.offset = keys - queries + first;
    piece.seen = max(0, piece.offset + piece.rows), piece.blocks = (piece.seen + KEYS - 1) / KEYS;
  }
};

// A place in a ring of STAGES, and the parity of its barriers.
struct Slot {
  u32 stage, parity;
  __device__ __forceinline__ void next() { parity ^= stage, stage ^= 1; }
};
static_assert(STAGES == 2, "Slot::next counts to two");
