// What a CTA of `sm90_kernel.cu` works on: 256 rows of one expert's weights against at most MOST of its rows of activations.
//
// With CTAS = 2 two of them make a cluster, and what both need is read once for both: the same weights against two parts of an
// expert's rows, or the same rows (its only part, or the last of an odd number) against two tiles of its weights.
//
// Of a few tokens (SHARES) there may be fewer items than clusters: then as many as find room share the columns of each.

constexpr int BLOCK = 128;                        // weight rows of a half: gate or up, or one after the other
constexpr int STEP = NVFP4 ? 256 : 128;           // columns of a stage: 128 bytes of weights a row
constexpr bool SHARES = MOST <= 8;
constexpr int STEPS = COLUMNS / STEP;
constexpr int MOST_SHARERS = !SHARES ? 1 : STEPS < 8 ? STEPS : 8;  // of an item; the last one has the sums of all in registers
constexpr int EARLY = STEPS < STAGES ? STEPS : STAGES;  // stages of weights that are loaded before the activations exist
constexpr int HEIGHT = SWIGLU ? 2 * ROWS : ROWS;  // of an expert's weights
constexpr int TILES = SWIGLU ? ROWS / BLOCK : (ROWS + 2 * BLOCK - 1) / (2 * BLOCK);
constexpr int TURNS = (TILES + CTAS - 1) / CTAS;  // of a cluster for one part; the last of an odd number of tiles is for nothing
constexpr int HALF = BLOCK * 128, BOX = 8 * 128;  // bytes of a half's stage, and of 8 rows of activations (64 BF16 or 128 FP8)
constexpr int PANEL = MOST * 128, PANELS = NVFP4 ? 4 : 1;
constexpr int SCALED = MOST < 32 ? 32 : MOST;     // scales of FP8 rows that are loaded: 128 bytes keep stages aligned

static_assert(COLUMNS % STEP == 0 && ROWS % BLOCK == 0, "only whole stages and halves");

// Tiles of the same weights are neighbours: the L2 has them for all but the first. An expert's parts are of one size.
struct Item {
  int expert, tile, slot, rows;
  bool same_weights;             // as the other CTA, else the same rows
  int first_step = 0, end_step;  // SHARES: those that this cluster takes
  __device__ __forceinline__ Item(int4 found, int index, int rank) {
    const int parts = (found.w + MOST - 1) / MOST, groups = parts / CTAS, place = index - found.y * TURNS;
    const int alone = place - groups * CTAS * TURNS, size = ((found.w + parts - 1) / parts + 7) / 8 * 8;
    same_weights = alone < 0;
    const int part = same_weights ? place % groups * CTAS + rank : parts - 1;
    expert = found.x, tile = same_weights ? place / groups : alone * CTAS + rank;
    slot = found.z + part * size, rows = min(found.w - part * size, size);
  }
  __device__ __forceinline__ int first() const { return SHARES ? first_step : 0; }
  __device__ __forceinline__ int steps() const { return SHARES ? end_step - first_step : STEPS; }
  __device__ __forceinline__ int boxes() const { return (rows + 7) / 8; }
  __device__ __forceinline__ int written() const { return tile < TILES ? rows : 0; }
  __device__ __forceinline__ int weight_row(int half) const {
    return expert * HEIGHT + (SWIGLU ? half * ROWS + tile * BLOCK : (2 * tile + half) * BLOCK);
  }
};

// All that clusters take: `count` parts of items, whose sharers are neighbours.
struct Work {
  const int4* found;  // by `moe_permute`
  int sharers, count;
  __device__ __forceinline__ Work(const int4* found) : found(found) {
    const int items = found[0].x * TURNS, clusters = gridDim.x / CTAS;
    sharers = SHARES && items ? max(1, min(MOST_SHARERS, clusters / items)) : 1;
    count = items * sharers;
  }
};

// What an item is made of.
struct Place {
  int4 found;
  int index, rank, share, sharers;
  __device__ __forceinline__ Place(const Work& work, int at, int rank)
      : found(work.found[1 + at / work.sharers / TURNS]), index(at / work.sharers), rank(rank), share(at % work.sharers),
        sharers(work.sharers) {}
  __device__ __forceinline__ Item item() const {
    Item item(found, index, rank);
    item.first_step = share * STEPS / sharers, item.end_step = (share + 1) * STEPS / sharers;
    return item;
  }
};

struct Shared {
  char weights[STAGES][2 * HALF], rows[STAGES][PANELS * PANEL];
#if NVFP4
  char scales[STAGES][2 * BLOCK * 16];  // of 16 weights each, 16 a row
#else
  float scales[STAGES][SCALED];         // of the activations' rows
#endif
  float tops[8][MOST], inverse[MOST];
  u64 full[STAGES], empty[STAGES];
  int arrived;  // sharers of an item
};

// What the copy engine reads: rows of activations in eights and in 32s.
struct Maps {
  const TensorMap *weights, *rows, *more_rows, *scales;
};

// A place in the ring of stages.
struct Turn {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// An 8x8 matrix of BF16 in a warp's registers, transposed.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}
