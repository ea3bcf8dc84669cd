// Prints a hash of what every kernel of one level makes from the same generated weights; levels must print the same.
// LEVEL is defined on the command line: scalar_kernels, avx2_kernels, avx512_kernels or neon_kernels.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace native;

namespace {

uint64_t state = 1;

uint32_t draw() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
}

template <class T>
void show(const char* what, const std::vector<T>& data) {
    uint64_t hash = 14695981039346656037u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
    for (size_t i = 0; i < data.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    std::printf("%s %016llx\n", what, static_cast<unsigned long long>(hash));
}

void convert(const Kernels& level, const Tensor& source, bool blocks) {
    const size_t size = static_cast<size_t>(source.n * source.k);
    std::vector<uint8_t> weight(size), scales(size / 16);
    std::vector<uint16_t> wide(size);
    std::vector<float> floats(size / 16);
    const float top = level.amax(source, false, false);
    show("amax", std::vector<float>{top, level.amax(source, true, false), level.amax(source, false, true)});
    for (int group : {16, 32}) {
        for (Search search : {Search::amax, Search::four_over_six, Search::least_error}) {
            for (bool exact : {false, true}) {
                const Nvfp4 how{top / 2688, group, exact && blocks, search, top, 256, 4, 126};
                level.nvfp4(source, how, weight.data(), scales.data());
                show("nvfp4", weight);
                show("nvfp4 scales", scales);
                const Tensor made{Layout::nvfp4, source.n, source.k, weight.data(), scales.data(), how.scale_2, group, nullptr};
                std::vector<double> sums(static_cast<size_t>(source.n) * 3);
                std::vector<int64_t> clipped(static_cast<size_t>(source.n));
                double* first = sums.data();
                level.errors(source, made, top / 2, {first, first + source.n, first + 2 * source.n, clipped.data()});
                show("errors", sums);
                show("clipped", clipped);
            }
        }
    }
    level.mxfp8(source, weight.data(), scales.data()), show("mxfp8", weight), show("mxfp8 scales", scales);
    level.mxfp4(source, weight.data(), scales.data()), show("mxfp4", weight), show("mxfp4 scales", scales);
    level.fp8(source, top / 448, weight.data()), show("fp8", weight);
    level.fp8_channel(source, weight.data(), floats.data()), show("fp8_channel", weight), show("fp8_channel scales", floats);
    if (source.k % 128 == 0) {
        level.int4(source, weight.data(), floats.data()), show("int4", weight), show("int4 scales", floats);
    }
    level.bf16(source, wide.data()), show("bf16", wide);
}

}  // namespace

int main() {
    for (const auto& [n, k] : {std::pair{192, 384}, std::pair{130, 160}}) {
        std::vector<uint8_t> codes(static_cast<size_t>(n * k));
        std::vector<float> scales(static_cast<size_t>(((n + 127) / 128) * ((k + 127) / 128)));
        std::vector<uint16_t> halves(codes.size());
        for (auto& code : codes) code = static_cast<uint8_t>(draw() % 255 == 127 ? 0 : draw() % 127 | (draw() & 0x80));
        for (auto& scale : scales) scale = static_cast<float>(draw() % 1000 + 1) * 1e-6f;
        for (auto& half : halves) half = static_cast<uint16_t>((draw() & 0x8000) | (0x3800 + draw() % 0x600));
        convert(LEVEL, {Layout::fp8_block, n, k, codes.data(), scales.data(), 1, 16, nullptr}, true);
        convert(LEVEL, {Layout::bf16, n, k, halves.data(), nullptr, 1, 16, nullptr}, false);
    }
}
