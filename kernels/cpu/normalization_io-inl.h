// Matrices between tensors and the kernels' layouts: conversion, dustbin border, transposition.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_IO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_IO_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_IO_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_IO_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/normalization_layout-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A tensor of n x m matrices, row-major, one per member.
struct MatrixTensor {
  DType dtype = DType::kFloat32;
  void* data = nullptr;
  int64_t n = 0, m = 0;
  bool shared = false;

  explicit operator bool() const { return data != nullptr; }
  int64_t Offset(int64_t member) const { return shared ? 0 : member * n * m; }
};
inline MatrixTensor InputTensor(const TensorView& view, int64_t n, int64_t m) {
  return {view.dtype, const_cast<void*>(view.data), n, m, view.shared};  // Only read.
}
inline MatrixTensor OutputTensor(const OutputView& view, int64_t n, int64_t m) {
  return {view.dtype, view.data, n, m, false};
}

// The lines of some members' matrices, still to be fetched into the cache, an equal part of them at each of `times`
// calls. Fetched at once they would fill the core's line buffers and stop it; not at all, the stores of a group wait
// for their lines and the loads behind them for the stores.
class Fetcher {
 public:
  Fetcher() = default;
  Fetcher(const MatrixTensor& tensor, int64_t member, int64_t count, int64_t times) {
    if (!tensor || count <= 0 || tensor.shared) return;
    const int64_t size = static_cast<int64_t>(SizeOf(tensor.dtype));
    next_ = static_cast<const char*>(tensor.data) + tensor.Offset(member) * size;
    end_ = next_ + count * tensor.n * tensor.m * size;
    step_ = RoundUp((end_ - next_) / std::max<int64_t>(times, 1), 64);
  }
  HWY_INLINE void Some() {
    for (const char* stop = std::min(next_ + step_, end_); next_ < stop; next_ += 64) hwy::Prefetch(next_);
  }

 private:
  const char* next_ = nullptr;
  const char* end_ = nullptr;
  int64_t step_ = 0;
};

template <class T>
constexpr DType kDTypeOf = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;

// The members whose matrices a solver holds: one per lane, or one alone. Lanes past `count` repeat the first member and
// are never stored; neither are those that are switched off.
template <int64_t kMembers>
struct Group {
  int64_t member[kMembers];
  bool store[kMembers];
  double border[kMembers];  // Dustbin scores.
};

// ---- LaneLayout -----------------------------------------------------------------------------------------------------
template <class Layout>
class LaneIo {
 public:
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  static constexpr int64_t kLanes = Layout::kLanes;

  LaneIo(const Layout& layout, bool transposed) : layout_(layout), transposed_(transposed) {}

  // Lanes are never a tensor's own memory.
  T* Direct(const MatrixTensor&, bool, const Group<kLanes>&) const { return nullptr; }

  static int64_t StageElements(const Layout& layout, int64_t /*block_rows*/) {
    return kLanes * RoundUp(layout.rows() * layout.cols() + kLanes, kLanes);
  }

  // `with_border`: the tensor lacks P's last row and column, which are filled with the members' scores.
  void Load(const MatrixTensor& tensor, bool with_border, const Group<kLanes>& group, int64_t, int64_t, T, T* stage,
            T* matrix) const {
    const bool direct = tensor.dtype == kDTypeOf<T> && !with_border;
    const T* source[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) {
      T* copy = stage + l * StageStride();
      source[l] = direct ? static_cast<const T*>(tensor.data) + tensor.Offset(group.member[l]) : copy;
      if (direct) continue;
      if (with_border) {
        LoadWithBorder(tensor, group.member[l], static_cast<T>(group.border[l]), copy);
      } else {
        LoadRow(tensor.dtype, tensor.data, tensor.Offset(group.member[l]), tensor.n * tensor.m, copy);
      }
    }
    const int64_t size = layout_.rows() * layout_.cols();
    Position to(*this);
    int64_t e = 0;
    for (; e + kLanes <= size; e += kLanes) {
      InterleaveTo([&](int64_t l) { return source[l] + e; }, kLanes, &to, matrix);
    }
    if (e == size) return;
    HWY_ALIGN T tail[kLanes * kLanes] = {};  // A vector from the tensor itself would end past its last matrix.
    for (int64_t l = 0; l < kLanes; ++l) std::copy(source[l] + e, source[l] + size, tail + l * kLanes);
    InterleaveTo([&](int64_t l) { return tail + l * kLanes; }, size - e, &to, matrix);
  }

  void Store(const T* matrix, const Group<kLanes>& group, bool with_border, int64_t, int64_t, T* stage,
             const MatrixTensor& tensor) const {
    const bool direct = tensor.dtype == kDTypeOf<T> && !with_border;
    const int64_t size = layout_.rows() * layout_.cols();
    T* target[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) {
      const bool into_tensor = direct && group.store[l];
      target[l] =
          into_tensor ? static_cast<T*>(tensor.data) + tensor.Offset(group.member[l]) : stage + l * StageStride();
    }
    Position from(*this);
    int64_t e = 0;
    for (; e + kLanes <= size; e += kLanes) {
      SeparateTo([&](int64_t l) { return target[l] + e; }, kLanes, matrix, &from);
    }
    if (e < size) {
      HWY_ALIGN T tail[kLanes * kLanes];
      SeparateTo([&](int64_t l) { return tail + l * kLanes; }, size - e, matrix, &from);
      for (int64_t l = 0; l < kLanes; ++l) std::memcpy(target[l] + e, tail + l * kLanes, (size - e) * sizeof(T));
    }
    if (direct) return;
    for (int64_t l = 0; l < kLanes; ++l) {
      if (group.store[l]) StoreStage(target[l], group.member[l], with_border, tensor);
    }
  }

 private:
  // Where the elements of a tensor's matrix, taken in order, lie in a kernel's.
  struct Position {
    explicit Position(const LaneIo& io)
        : step(io.transposed_ ? io.layout_.cols() : 1),
          line(io.transposed_ ? io.layout_.rows() : io.layout_.rows() * io.layout_.cols()) {}
    int64_t Next() {
      const int64_t at = i * step + j;
      if (++i == line) i = 0, ++j;
      return at * kLanes;
    }
    const int64_t step, line;
    int64_t i = 0, j = 0;
  };

  int64_t StageStride() const { return RoundUp(layout_.rows() * layout_.cols() + kLanes, kLanes); }

  template <class Source>
  HWY_INLINE static void InterleaveTo(Source source, int64_t count, Position* to, T* matrix) {
    const D d;
    V v[kLanes];
    SINKHORN_UNROLLED for (int64_t l = 0; l < kLanes; ++l) v[l] = hn::LoadU(d, source(l));
    Transpose(d, v);
    if (to->step == 1 && count == kLanes) {
      SINKHORN_UNROLLED for (int64_t k = 0; k < kLanes; ++k) hn::Store(v[k], d, matrix + (to->i + k) * kLanes);
      to->i += kLanes;
      return;
    }
    HWY_ALIGN T square[kLanes * kLanes];
    SINKHORN_UNROLLED for (int64_t k = 0; k < kLanes; ++k) hn::Store(v[k], d, square + k * kLanes);
    for (int64_t k = 0; k < count; ++k) hn::Store(hn::Load(d, square + k * kLanes), d, matrix + to->Next());
  }

  template <class Target>
  HWY_INLINE static void SeparateTo(Target target, int64_t count, const T* matrix, Position* from) {
    const D d;
    V v[kLanes];
    if (from->step == 1 && count == kLanes) {
      SINKHORN_UNROLLED for (int64_t k = 0; k < kLanes; ++k) v[k] = hn::Load(d, matrix + (from->i + k) * kLanes);
      from->i += kLanes;
    } else {
      HWY_ALIGN T square[kLanes * kLanes] = {};
      for (int64_t k = 0; k < count; ++k) hn::Store(hn::Load(d, matrix + from->Next()), d, square + k * kLanes);
      SINKHORN_UNROLLED for (int64_t k = 0; k < kLanes; ++k) v[k] = hn::Load(d, square + k * kLanes);
    }
    Transpose(d, v);
    SINKHORN_UNROLLED for (int64_t l = 0; l < kLanes; ++l) hn::StoreU(v[l], d, target(l));
  }

  static void LoadWithBorder(const MatrixTensor& tensor, int64_t member, T border, T* out) {
    for (int64_t i = 0; i < tensor.n; ++i, out += tensor.m + 1) {
      LoadRow(tensor.dtype, tensor.data, tensor.Offset(member) + i * tensor.m, tensor.m, out);
      out[tensor.m] = border;
    }
    std::fill(out, out + tensor.m + 1, border);
  }

  static void StoreStage(const T* stage, int64_t member, bool with_border, const MatrixTensor& tensor) {
    if (!with_border) return StoreRow(tensor.dtype, stage, tensor.n * tensor.m, tensor.data, tensor.Offset(member));
    for (int64_t i = 0; i < tensor.n; ++i) {
      StoreRow(tensor.dtype, stage + i * (tensor.m + 1), tensor.m, tensor.data, tensor.Offset(member) + i * tensor.m);
    }
  }

  const Layout& layout_;
  const bool transposed_;
};

// ---- RowLayout ------------------------------------------------------------------------------------------------------
template <class Layout>
class RowIo {
 public:
  using T = typename Layout::T;
  using D = typename Layout::D;
  using V = typename Layout::V;
  static constexpr int64_t kLanes = Layout::kLanes;

  RowIo(const Layout& layout, bool transposed) : layout_(layout), transposed_(transposed) {}

  // The member's matrix itself where kernels can work on it: rows of whole vectors of their type, of any alignment.
  T* Direct(const MatrixTensor& tensor, bool with_border, const Group<1>& group) const {
    const bool same = tensor && tensor.dtype == kDTypeOf<T> && !with_border && !transposed_ && group.store[0] &&
                      layout_.cols() == layout_.stride();
    return same ? static_cast<T*>(tensor.data) + tensor.Offset(group.member[0]) : nullptr;
  }

  static int64_t StageElements(const Layout&, int64_t block_rows) { return kLanes * RoundUp(block_rows, kLanes); }

  // Rows [begin, end) of the kernel's matrix. Padding columns become `pad`.
  void Load(const MatrixTensor& tensor, bool with_border, const Group<1>& group, int64_t begin, int64_t end, T pad,
            T* stage, T* matrix) const {
    const T border = static_cast<T>(group.border[0]);
    if (!transposed_) {
      for (int64_t i = begin; i < end; ++i) {
        T* row = matrix + i * layout_.stride();
        LoadLine(tensor, with_border, group.member[0], i, 0, layout_.cols(), border, row);
        std::fill(row + layout_.cols(), row + layout_.stride(), pad);
      }
      return;
    }
    const D d;
    const int64_t stage_stride = RoundUp(end - begin, kLanes);
    for (int64_t q = 0; q < layout_.cols(); q += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        T* line = stage + l * stage_stride;
        if (q + l < layout_.cols()) {
          LoadLine(tensor, with_border, group.member[0], q + l, begin, end, border, line);
          std::fill(line + (end - begin), line + stage_stride, T(0));
        } else {
          std::fill(line, line + stage_stride, pad);
        }
      }
      for (int64_t c = 0; c < end - begin; c += kLanes) {
        V v[kLanes];
        SINKHORN_UNROLLED for (int64_t l = 0; l < kLanes; ++l) v[l] = hn::Load(d, stage + l * stage_stride + c);
        Transpose(d, v);
        HWY_ALIGN T square[kLanes * kLanes];
        SINKHORN_UNROLLED for (int64_t k = 0; k < kLanes; ++k) hn::Store(v[k], d, square + k * kLanes);
        for (int64_t k = 0; k < std::min(kLanes, end - begin - c); ++k) {
          hn::Store(hn::Load(d, square + k * kLanes), d, matrix + (begin + c + k) * layout_.stride() + q);
        }
      }
    }
  }

  void Store(const T* matrix, const Group<1>& group, bool with_border, int64_t begin, int64_t end, T* stage,
             const MatrixTensor& tensor) const {
    if (!group.store[0]) return;
    if (!transposed_) {
      for (int64_t i = begin; i < end; ++i) {
        StoreLine(matrix + i * layout_.stride(), group.member[0], i, 0, layout_.cols(), with_border, tensor);
      }
      return;
    }
    const D d;
    const int64_t stage_stride = RoundUp(end - begin, kLanes);
    for (int64_t q = 0; q < layout_.cols(); q += kLanes) {
      for (int64_t c = 0; c < end - begin; c += kLanes) {
        HWY_ALIGN T square[kLanes * kLanes] = {};
        for (int64_t k = 0; k < std::min(kLanes, end - begin - c); ++k) {
          hn::Store(hn::Load(d, matrix + (begin + c + k) * layout_.stride() + q), d, square + k * kLanes);
        }
        V v[kLanes];
        SINKHORN_UNROLLED for (int64_t k = 0; k < kLanes; ++k) v[k] = hn::Load(d, square + k * kLanes);
        Transpose(d, v);
        SINKHORN_UNROLLED for (int64_t l = 0; l < kLanes; ++l) hn::Store(v[l], d, stage + l * stage_stride + c);
      }
      for (int64_t l = 0; l < std::min(kLanes, layout_.cols() - q); ++l) {
        StoreLine(stage + l * stage_stride, group.member[0], q + l, begin, end, with_border, tensor);
      }
    }
  }

 private:
  // Elements [begin, end) of row i of P's shape.
  static void LoadLine(const MatrixTensor& tensor, bool with_border, int64_t member, int64_t i, int64_t begin,
                       int64_t end, T border, T* out) {
    const int64_t inside = with_border && i == tensor.n ? begin : std::min(end, tensor.m);
    if (inside > begin)
      LoadRow(tensor.dtype, tensor.data, tensor.Offset(member) + i * tensor.m + begin, inside - begin, out);
    std::fill(out + std::max<int64_t>(inside - begin, 0), out + (end - begin), border);
  }
  static void StoreLine(const T* line, int64_t member, int64_t i, int64_t begin, int64_t end, bool with_border,
                        const MatrixTensor& tensor) {
    if (with_border && i == tensor.n) return;
    const int64_t inside = std::min(end, tensor.m);
    if (inside > begin)
      StoreRow(tensor.dtype, line, inside - begin, tensor.data, tensor.Offset(member) + i * tensor.m + begin);
  }

  const Layout& layout_;
  const bool transposed_;
};

template <class Layout>
struct IoOf {
  using Type = RowIo<Layout>;
};
template <class T>
struct IoOf<LaneLayout<T>> {
  using Type = LaneIo<LaneLayout<T>>;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_IO_INL_H_
