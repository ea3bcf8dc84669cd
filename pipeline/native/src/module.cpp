// The Python module `pipeline.native._kernels`: checks shapes and types, drops the GIL, calls a level's kernel.
//
// Arrays may be of any numpy type of the right width (ml_dtypes' bfloat16 and float8_e4m3fn included); nothing is copied.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "dispatch.h"

namespace py = pybind11;

namespace native {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw py::value_error(text); }

void check(const py::array& array, const char* name, int64_t size, int width) {
    const std::string what = std::string("native kernels: ") + name;
    if (!(array.flags() & py::array::c_style)) refuse(what + " is not contiguous");
    if (array.itemsize() != width) {
        refuse(what + " has " + std::to_string(array.itemsize()) + " bytes an element, not " + std::to_string(width));
    }
    if (array.size() != size) {
        refuse(what + " has " + std::to_string(array.size()) + " elements, not " + std::to_string(size));
    }
}

template <class T>
T* output(py::array& array, const char* name, int64_t size) {
    check(array, name, size, sizeof(T));
    return static_cast<T*>(array.mutable_data());
}

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

struct Described {
    Layout layout;
    int width;  // bytes of a stored element
};

const std::map<std::string, Described> kLayouts = {
    {"bf16", {Layout::bf16, 2}},   {"f16", {Layout::f16, 2}},   {"f32", {Layout::f32, 4}},
    {"fp8", {Layout::fp8, 1}},     {"nvfp4", {Layout::nvfp4, 1}}, {"fp8_channel", {Layout::fp8_channel, 1}},
    {"mxfp8", {Layout::mxfp8, 1}}, {"mxfp4", {Layout::mxfp4, 1}}, {"fp8_block", {Layout::fp8_block, 1}},
    {"int4", {Layout::int4, 1}},
};

// Elements of the stored weight and of its scales.
std::pair<int64_t, int64_t> sizes(const Tensor& t) {
    switch (t.layout) {
        case Layout::fp8_channel: return {t.n * t.k, t.n};
        case Layout::fp8_block: return {t.n * t.k, blocks(t.n, 128) * blocks(t.k, 128)};
        case Layout::nvfp4: return {t.n * t.k / 2, t.n * t.k / t.group};
        case Layout::mxfp8: return {t.n * t.k, t.n * t.k / 32};
        case Layout::mxfp4: return {t.n * t.k / 2, t.n * t.k / 32};
        case Layout::int4: return {t.n * t.k / 2, t.n * t.k / 128};
        default: return {t.n * t.k, 0};
    }
}

void check_shape(const Tensor& t) {
    const int64_t multiple = t.layout == Layout::nvfp4 ? t.group : t.layout == Layout::int4 ? 128 : 32;
    const bool grouped = t.layout == Layout::nvfp4 || t.layout == Layout::mxfp8 || t.layout == Layout::mxfp4;
    if ((grouped || t.layout == Layout::int4) && t.k % multiple) refuse("native kernels: K is not a multiple of the group");
    if (t.layout == Layout::int4 && t.n % 2) refuse("native kernels: INT4 packs rows two by two, but N is odd");
    if (t.layout == Layout::nvfp4 && t.group != 16 && t.group != 32) refuse("native kernels: NVFP4 groups hold 16 or 32");
}

// A described tensor, with the arrays that it points into.
struct Stored {
    Tensor tensor;
    py::array weight;
    py::object scale, factors;
};

Stored describe(const std::string& layout, int64_t n, int64_t k, py::array weight, py::object scale, float scale_2, int group,
                py::object factors) {
    const auto found = kLayouts.find(layout);
    if (found == kLayouts.end()) refuse("native kernels: no layout " + layout);
    Stored s{{found->second.layout, n, k, weight.data(), nullptr, scale_2, group, nullptr}, weight, scale, factors};
    check_shape(s.tensor);
    const auto [num_weights, num_scales] = sizes(s.tensor);
    check(weight, "weight", num_weights, found->second.width);
    if (num_scales) {
        const auto array = scale.cast<py::array>();
        const bool one_byte = s.tensor.layout == Layout::nvfp4 || s.tensor.layout == Layout::mxfp8 || s.tensor.layout == Layout::mxfp4;
        check(array, "weight_scale", num_scales, one_byte ? 1 : 4);
        s.tensor.scale = array.data();
    }
    if (!factors.is_none()) {
        const auto array = factors.cast<py::array>();
        check(array, "pre_quant_scale", k, 2);
        s.tensor.factors = static_cast<const uint16_t*>(array.data());
    }
    return s;
}

void require_groups(const Tensor& t, int group) {
    if (t.k % group) refuse("native kernels: K is " + std::to_string(t.k) + ", not a multiple of " + std::to_string(group));
}

// Runs `call` without the GIL.
template <class Call>
auto unlocked(Call call) {
    py::gil_scoped_release release;
    return call();
}

// One level, as Python sees it.
struct Level {
    const Kernels* kernels;

    float amax(const Stored& s, bool exact, bool quick) const {
        return unlocked([&] { return kernels->amax(s.tensor, exact, quick); });
    }

    void bf16(const Stored& s, py::array weight) const {
        auto* out = output<uint16_t>(weight, "weight", s.tensor.n * s.tensor.k);
        unlocked([&] { kernels->bf16(s.tensor, out); });
    }

    void fp8(const Stored& s, float scale, py::array weight) const {
        auto* out = output<uint8_t>(weight, "weight", s.tensor.n * s.tensor.k);
        unlocked([&] { kernels->fp8(s.tensor, scale, out); });
    }

    void fp8_channel(const Stored& s, py::array weight, py::array scale) const {
        auto* out = output<uint8_t>(weight, "weight", s.tensor.n * s.tensor.k);
        auto* scales = output<float>(scale, "weight_scale", s.tensor.n);
        unlocked([&] { kernels->fp8_channel(s.tensor, out, scales); });
    }

    void mxfp8(const Stored& s, py::array weight, py::array scale) const {
        require_groups(s.tensor, 32);
        auto* out = output<uint8_t>(weight, "weight", s.tensor.n * s.tensor.k);
        auto* scales = output<uint8_t>(scale, "weight_scale", s.tensor.n * s.tensor.k / 32);
        unlocked([&] { kernels->mxfp8(s.tensor, out, scales); });
    }

    void mxfp4(const Stored& s, py::array weight, py::array scale) const {
        require_groups(s.tensor, 32);
        auto* out = output<uint8_t>(weight, "weight", s.tensor.n * s.tensor.k / 2);
        auto* scales = output<uint8_t>(scale, "weight_scale", s.tensor.n * s.tensor.k / 32);
        unlocked([&] { kernels->mxfp4(s.tensor, out, scales); });
    }

    void int4(const Stored& s, py::array weight, py::array scale) const {
        require_groups(s.tensor, 128);
        if (s.tensor.n % 2) refuse("native kernels: INT4 packs rows two by two, but N is odd");
        auto* out = output<uint8_t>(weight, "weight", s.tensor.n * s.tensor.k / 2);
        auto* scales = output<float>(scale, "weight_scale", s.tensor.n * s.tensor.k / 128);
        unlocked([&] { kernels->int4(s.tensor, out, scales); });
    }

    bool nvfp4(const Stored& s, const Nvfp4& how, py::array weight, py::array scale) const {
        if (how.group != 16 && how.group != 32) refuse("native kernels: NVFP4 groups hold 16 or 32");
        require_groups(s.tensor, how.group);
        const bool kept = s.tensor.layout == Layout::fp8_block || s.tensor.layout == Layout::bf16;
        if (how.exact && !kept) refuse("native kernels: exact NVFP4 is made from FP8 blocks or BF16 only");
        auto* out = output<uint8_t>(weight, "weight", s.tensor.n * s.tensor.k / 2);
        auto* scales = output<uint8_t>(scale, "weight_scale", s.tensor.n * s.tensor.k / how.group);
        return unlocked([&] { return kernels->nvfp4(s.tensor, how, out, scales); });
    }

    void errors(const Stored& wanted, const Stored& got, double limit, py::array signal, py::array noise, py::array max_abs,
                py::array clipped) const {
        const int64_t n = wanted.tensor.n;
        if (got.tensor.n != n || got.tensor.k != wanted.tensor.k) refuse("native kernels: the weights' shapes differ");
        const RowErrors out{output<double>(signal, "signal", n), output<double>(noise, "noise", n),
                            output<double>(max_abs, "max_abs", n), output<int64_t>(clipped, "clipped", n)};
        unlocked([&] { kernels->errors(wanted.tensor, got.tensor, limit, out); });
    }
};

Nvfp4 nvfp4_options(float scale_2, int group, bool exact, const std::string& search, float amax, float unit, int reach,
                    int last_code) {
    const Search how = search == "amax" ? Search::amax : search == "four_over_six" ? Search::four_over_six : Search::least_error;
    return {scale_2, group, exact, how, amax, unit, reach, last_code};
}

std::vector<std::string> level_names() {
    std::vector<std::string> names;
    for (const Kernels* level : usable_levels()) names.emplace_back(level->name);
    return names;
}

Level level_named(const std::string& name) {
    for (const Kernels* level : usable_levels()) {
        if (name == level->name) return {level};
    }
    refuse("native kernels: this processor or build has no level " + name);
}

}  // namespace
}  // namespace native

PYBIND11_MODULE(_kernels, m) {
    using namespace native;
    m.attr("sources") = NATIVE_SOURCES;
    py::class_<Stored>(m, "Tensor")
        .def(py::init(&describe), py::arg("layout"), py::arg("n"), py::arg("k"), py::arg("weight").noconvert(),
             py::arg("scale") = py::none(), py::kw_only(), py::arg("scale_2") = 1.0f, py::arg("group") = 16,
             py::arg("factors") = py::none());
    py::class_<Nvfp4>(m, "Nvfp4")
        .def(py::init(&nvfp4_options), py::arg("scale_2"), py::kw_only(), py::arg("group"), py::arg("exact"),
             py::arg("search"), py::arg("amax"), py::arg("unit"), py::arg("reach"), py::arg("last_code"));
    const auto out = [](const char* name) { return py::arg(name).noconvert(); };
    py::class_<Level>(m, "Level")
        .def_property_readonly("name", [](const Level& level) { return level.kernels->name; })
        .def("amax", &Level::amax, py::arg("source"), py::arg("exact"), py::arg("quick") = false)
        .def("bf16", &Level::bf16, py::arg("source"), out("weight"))
        .def("fp8", &Level::fp8, py::arg("source"), py::arg("scale"), out("weight"))
        .def("fp8_channel", &Level::fp8_channel, py::arg("source"), out("weight"), out("scale"))
        .def("mxfp8", &Level::mxfp8, py::arg("source"), out("weight"), out("scale"))
        .def("mxfp4", &Level::mxfp4, py::arg("source"), out("weight"), out("scale"))
        .def("int4", &Level::int4, py::arg("source"), out("weight"), out("scale"))
        .def("nvfp4", &Level::nvfp4, py::arg("source"), py::arg("how"), out("weight"), out("scale"))
        .def("errors", &Level::errors, py::arg("wanted"), py::arg("got"), py::arg("limit"), out("signal"), out("noise"),
             out("max_abs"), out("clipped"));
    m.def("levels", &level_names, "Names of the levels that this processor can run, the best first.");
    m.def("level", &level_named, py::arg("name"));
}
