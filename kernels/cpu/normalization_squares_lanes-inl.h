// N x N matrices one per lane, N = 4 and 8: how a group of them is kept, and its way between tensors and lanes.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_LANES_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_LANES_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_LANES_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/normalization_kernels.h"
#include "kernels/cpu/normalization_layout-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A line is what is scaled first: a row, or a column where the spec is transposed.
template <int N>
class SquareLanes {
 public:
  using T = float;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  static constexpr int kSize = N * N;
  static constexpr int kLinesElements = kLanes > N ? kLanes : N;  // Of whole lines, in whole vectors.

 protected:
  explicit SquareLanes(const NormalizationSpec& spec) : spec_(spec) {}

  struct Lanes {
    int64_t member[kLanes];
    bool store[kLanes];
    bool in_order;  // The members follow one another.
    bool all, any;  // Of `store`.
    T *k, *bar = nullptr, *factor = nullptr;
    T *u, *v, *x, *y;                    // Of all iterations, from 0.
    HWY_ALIGN T first[N * kLanes];       // u of the last iteration,
    HWY_ALIGN T second[N * kLanes];      // v,
    HWY_ALIGN T sums[N * kLanes];        // and the sums that v was made from.
    HWY_ALIGN T first_bar[N * kLanes];   // Adjoints of log u
    HWY_ALIGN T second_bar[N * kLanes];  // and of log v after the last iteration.
  };
  // Element j of line i.
  static constexpr int At(int i, int j) { return (i * N + j) * kLanes; }
  // Where element e of a tensor's matrix is kept.
  static constexpr int Place(int e, bool transposed) { return transposed ? At(e % N, e / N) : e * kLanes; }
  static V LoadAt(const T* matrix, int i, int j) { return hn::Load(D(), matrix + At(i, j)); }
  static V Line(const T* x, int i) { return hn::Load(D(), x + i * kLanes); }
  static void PutLine(V value, T* x, int i) { hn::Store(value, D(), x + i * kLanes); }

  // sum_j M_ij x_j and sum_i M_ij x_i.
  HWY_INLINE static V RowDot(const T* matrix, int i, const V* x) {
    return Dot([=](int j) HWY_ATTR { return LoadAt(matrix, i, j); }, x);
  }
  HWY_INLINE static V ColumnDot(const T* matrix, int j, const V* x) {
    return Dot([=](int i) HWY_ATTR { return LoadAt(matrix, i, j); }, x);
  }
  // sum_k entry(k) x_k. Eight terms in two chains: in one they take longer than all else that there is to do.
  template <class F>
  HWY_INLINE static V Dot(F entry, const V* x) {
    constexpr int kChains = N / 4;
    V sum[kChains];
    SINKHORN_UNROLLED for (int k = 0; k < N; ++k) {
      sum[k % kChains] = k < kChains ? hn::Mul(entry(k), x[k]) : hn::MulAdd(entry(k), x[k], sum[k % kChains]);
    }
    return kChains == 1 ? sum[0] : hn::Add(sum[0], sum[kChains - 1]);
  }

  // Lanes begin, begin + 1, ... of `count` members. Those past the last repeat it and are not stored.
  static void Assign(const int64_t* members, int64_t count, int64_t begin, Lanes* g) {
    g->all = begin + kLanes <= count;
    g->any = begin < count;
    for (int l = 0; l < kLanes; ++l) {
      g->store[l] = begin + l < count;
      g->member[l] = members[std::min(begin + l, count - 1)];
    }
    g->in_order = g->member[kLanes - 1] - g->member[0] == kLanes - 1;
  }
  // Lanes beyond this tier: not stored, handed on.
  void HandOn(hn::Mask<D> lanes, Lanes* g, NormalizationTally* tally) {
    if (hn::AllFalse(D(), lanes)) return;
    HWY_ALIGN T flag[kLanes];
    hn::Store(hn::IfThenElse(lanes, hn::Set(D(), T(1)), hn::Zero(D())), D(), flag);
    g->all = g->any = false;
    for (int l = 0; l < kLanes; ++l) {
      if (g->store[l] && flag[l] != 0) tally->redo.push_back(g->member[l]);
      g->store[l] &= flag[l] == 0;
      g->any |= g->store[l];
    }
  }

  // ---- Tensors to lanes and back ------------------------------------------------------------------------------------
  // Where the lanes' matrices follow one another: in the tensor itself, or copied.
  const T* Source(const TensorView& view, const Lanes& g) const {
    if (view.dtype == DType::kFloat32 && !view.shared && g.in_order) {
      return static_cast<const T*>(view.data) + g.member[0] * kSize;
    }
    for (int l = 0; l < kLanes; ++l) {
      LoadRow(view.dtype, view.data, (view.shared ? 0 : g.member[l]) * kSize, kSize, stage_ + l * kSize);
    }
    return stage_;
  }
  // Elements [e, e + kLanes) of all lanes' matrices.
  template <bool kTransposed>
  HWY_INLINE static void LoadPiece(const T* source, int e, T* matrix) {
    static_assert(kSize % kLanes == 0, "whole vectors");
    const D d;
    V v[kLanes];
    LoadTransposed(d, source + e, kSize, v);
    SINKHORN_UNROLLED for (int k = 0; k < kLanes; ++k) {
      hn::Store(v[k], d, matrix + (kTransposed ? Place(e + k, true) : e * kLanes + k * kLanes));
    }
  }
  void Load(const TensorView& view, const Lanes& g, T* matrix) const {
    const T* source = Source(view, g);
    if (spec_.transposed) {
      SINKHORN_UNROLLED for (int e = 0; e < kSize; e += kLanes) LoadPiece<true>(source, e, matrix);
    } else {
      for (int e = 0; e < kSize; e += kLanes) LoadPiece<false>(source, e, matrix);
    }
  }
  // entry(i, j) gives element j of line i.
  template <class F>
  void Store(F entry, const Lanes& g, const OutputView& view) const {
    if (spec_.transposed) {
      StoreOriented<true>(entry, g, view);
    } else {
      StoreOriented<false>(entry, g, view);
    }
  }
  template <bool kTransposed, class F>
  HWY_INLINE void StoreOriented(F entry, const Lanes& g, const OutputView& view) const {
    const D d;
    const bool direct = view.dtype == DType::kFloat32 && g.in_order && g.all;
    T* target = direct ? static_cast<T*>(view.data) + g.member[0] * kSize : stage_;
    SINKHORN_UNROLLED for (int e = 0; e < kSize; e += kLanes) {
      V v[kLanes];
      SINKHORN_UNROLLED for (int k = 0; k < kLanes; ++k) {
        v[k] = kTransposed ? entry((e + k) % N, (e + k) / N) : entry((e + k) / N, (e + k) % N);
      }
      StoreTransposed(d, v, target + e, kSize);
    }
    if (direct) return;
    for (int l = 0; l < kLanes; ++l) {
      if (g.store[l]) StoreRow(view.dtype, target + l * kSize, kSize, view.data, g.member[l] * kSize);
    }
  }

  const NormalizationSpec& spec_;
  T* stage_ = nullptr;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_SQUARES_LANES_INL_H_
