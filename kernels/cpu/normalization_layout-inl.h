// Two layouts of matrices for SIMD, behind one set of names, so that an algorithm is written once.
//
//   LaneLayout   small matrices, one per lane: element (i, j) is a vector of the same element of `kLanes` matrices.
//   RowLayout    everything else, one matrix: its rows are cut into vectors, padded to whole ones.
//
// Either way a matrix row is `vectors()` vectors; a row quantity (one number per row) is read with LoadRow(x, i), which
// gives all lanes their matrix's value, and a column quantity with LoadCol(x, jv). A "lane scalar" is a vector that
// holds one number per matrix: RowLayout has the same number in all lanes. Reduce turns a vector of a row's partial
// results into a lane scalar. Padding columns are the algorithms' affair: KeepColumns zeroes them.
#if defined(SINKHORN_KERNELS_CPU_NORMALIZATION_LAYOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SINKHORN_KERNELS_CPU_NORMALIZATION_LAYOUT_INL_H_
#undef SINKHORN_KERNELS_CPU_NORMALIZATION_LAYOUT_INL_H_
#else
#define SINKHORN_KERNELS_CPU_NORMALIZATION_LAYOUT_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/normalization_transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sinkhorn::cpu::normalization::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using cpu::HWY_NAMESPACE::Exp;
using cpu::HWY_NAMESPACE::ExpBounded;
using cpu::HWY_NAMESPACE::ExpInRange;
using cpu::HWY_NAMESPACE::Log;
using cpu::HWY_NAMESPACE::Reciprocal;

constexpr int64_t RoundUp(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Hands out pieces of a block of memory, 128-byte aligned. With a null block it only measures.
class Arena {
 public:
  explicit Arena(void* block) : block_(static_cast<char*>(block)) {}
  template <class T>
  T* Take(int64_t count) {
    char* piece = block_ == nullptr ? nullptr : block_ + used_;
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), 128);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* block_;
  int64_t used_ = 0;
};

// Stores the lowest 128 bits.
template <class D, class V>
HWY_INLINE void StoreLowerBlock(D d, V value, hn::TFromD<D>* to) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) > 16) {
    const hn::Half<D> half;
    StoreLowerBlock(half, hn::LowerHalf(half, value), to);
  } else {
    hn::StoreU(value, d, to);
  }
}

// Long sums are sums of sums: a float32 sum of thousands of like terms, one by one, is wrong by 1e-5.
constexpr int64_t kPanelRows = HWY_TARGET == HWY_SCALAR ? 16 : 128;  // Vectors take four or more rows at a time.
constexpr int64_t kPanelVectors = 16;

// ---- One matrix per lane --------------------------------------------------------------------------------------------
template <class T_>
class LaneLayout {
 public:
  using T = T_;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr bool kPerLane = true;
  static constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));
  static constexpr int64_t kMembers = kLanes;

  LaneLayout(int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {}
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t vectors() const { return cols(); }
  int64_t row_elements() const { return rows() * kLanes; }  // Memory of a row quantity.
  int64_t col_elements() const { return cols() * kLanes; }
  int64_t stride() const { return cols() * kLanes; }  // Of a matrix row.
  int64_t matrix_elements() const { return rows() * stride(); }

  V LoadRow(const T* x, int64_t i) const { return hn::Load(D(), x + i * kLanes); }
  void StoreRow(V value, T* x, int64_t i) const { hn::Store(value, D(), x + i * kLanes); }
  V Reduce(V sum) const { return sum; }
  V ReduceMax(V max) const { return max; }
  V ReduceMin(V min) const { return min; }
  V KeepColumns(int64_t, V value) const { return value; }
  V ReplacePads(int64_t, V value, V) const { return value; }

  // Of the last row and the last column, within rows [begin, end).
  V BorderSum(const T* matrix, int64_t begin, int64_t end) const {
    V sum = hn::Zero(D());
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = i == rows() - 1 ? 0 : cols() - 1; j < cols(); ++j) {
        sum = hn::Add(sum, hn::Load(D(), matrix + i * stride() + j * kLanes));
      }
    }
    return sum;
  }

  // The row of the functor's turn.
  struct Row {
    int64_t i;
    V Load(const T* x) const { return hn::Load(D(), x + i * kLanes); }
    void Store(V value, T* x) const { hn::Store(value, D(), x + i * kLanes); }
  };

  // For each row i in [begin, end): w = f(row, sum_j M_ij y_j); acc_j = sum_i M_ij w.
  template <class F>
  HWY_INLINE void Sweep(const T* matrix, int64_t begin, int64_t end, const T* y, T* acc, F f) const {
    int64_t i = begin;
    bool first = true;
    for (; i + 4 <= end; i += 4, first = false) SweepRows<4>(matrix, i, y, acc, first, f);
    for (; i < end; ++i, first = false) SweepRows<1>(matrix, i, y, acc, first, f);
  }

 private:
  template <int R, class F>
  HWY_INLINE void SweepRows(const T* matrix, int64_t i, const T* y, T* acc, bool first, F f) const {
    const D d;
    const T* HWY_RESTRICT row[R];
    V w[R];
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      row[r] = matrix + (i + r) * stride();
      w[r] = hn::Zero(d);
    }
    for (int64_t begin = 0; begin < cols(); begin += kPanelVectors) {
      V part[R];
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) part[r] = hn::Zero(d);
      for (int64_t j = begin; j < std::min(begin + kPanelVectors, cols()); ++j) {
        const V yj = hn::Load(d, y + j * kLanes);
        SINKHORN_UNROLLED for (int r = 0; r < R; ++r) part[r] =
            hn::MulAdd(hn::Load(d, row[r] + j * kLanes), yj, part[r]);
      }
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) w[r] = hn::Add(w[r], part[r]);
    }
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) w[r] = f(Row{i + r}, w[r]);
    for (int64_t j = 0; j < cols(); ++j) {
      V sum = hn::Mul(hn::Load(d, row[0] + j * kLanes), w[0]);
      SINKHORN_UNROLLED for (int r = 1; r < R; ++r) sum = hn::MulAdd(hn::Load(d, row[r] + j * kLanes), w[r], sum);
      hn::Store(first ? sum : hn::Add(hn::Load(d, acc + j * kLanes), sum), d, acc + j * kLanes);
    }
  }

  int64_t rows_, cols_;
};

// ---- One matrix, rows in vectors ------------------------------------------------------------------------------------
template <class T_>
class RowLayout {
 public:
  using T = T_;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr bool kPerLane = false;
  static constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));
  static constexpr int64_t kMembers = 1;

  RowLayout(int64_t rows, int64_t cols) : rows_(rows), cols_(cols), vectors_(RoundUp(cols, kLanes) / kLanes) {}
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t vectors() const { return vectors_; }
  int64_t row_elements() const { return RoundUp(rows_, kLanes); }
  int64_t col_elements() const { return stride(); }
  int64_t stride() const { return vectors_ * kLanes; }
  int64_t matrix_elements() const { return rows_ * stride(); }

  V LoadRow(const T* x, int64_t i) const { return hn::Set(D(), x[i]); }
  void StoreRow(V value, T* x, int64_t i) const { x[i] = hn::GetLane(value); }
  V Reduce(V sum) const { return hn::SumOfLanes(D(), sum); }
  V ReduceMax(V max) const { return hn::MaxOfLanes(D(), max); }
  V ReduceMin(V min) const { return hn::MinOfLanes(D(), min); }
  V KeepColumns(int64_t jv, V value) const { return ReplacePads(jv, value, hn::Zero(D())); }
  V ReplacePads(int64_t jv, V value, V pad) const {
    const int64_t left = cols_ - jv * kLanes;
    return left >= kLanes ? value : hn::IfThenElse(hn::FirstN(D(), static_cast<size_t>(left)), value, pad);
  }

  V BorderSum(const T* matrix, int64_t begin, int64_t end) const {
    T sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = i == rows_ - 1 ? 0 : cols_ - 1; j < cols_; ++j) sum += matrix[i * stride() + j];
    }
    return hn::Set(D(), sum);
  }

#if HWY_TARGET == HWY_SCALAR
  static constexpr int kGroup = 1;
#else
  static constexpr int kGroup = 16 / sizeof(T);  // Rows that a 128-bit block holds.
#endif
  // R rows of the functor's turn: values repeat every R lanes. R: 1, kGroup or kLanes.
  template <int R>
  struct Row {
    int64_t i;
    V Load(const T* x) const {
      if constexpr (R == 1) {
        return hn::Set(D(), x[i]);
      } else if constexpr (R == kLanes) {
        return hn::LoadU(D(), x + i);
      } else {
        return hn::LoadDup128(D(), x + i);
      }
    }
    void Store(V value, T* x) const {
      if constexpr (R == 1) {
        x[i] = hn::GetLane(value);
      } else if constexpr (R == kLanes) {
        hn::StoreU(value, D(), x + i);
      } else {
        StoreLowerBlock(D(), value, x + i);
      }
    }
  };

  // As LaneLayout's. The functor may be given several rows at once: it works on each lane alike.
  template <class F>
  HWY_INLINE void Sweep(const T* matrix, int64_t begin, int64_t end, const T* y, T* acc, F f) const {
    switch (vectors_) {
      case 1:
        return SweepNarrow<1>(matrix, begin, end, y, acc, f);
      case 2:
        return SweepNarrow<2>(matrix, begin, end, y, acc, f);
      case 4:
        return SweepNarrow<4>(matrix, begin, end, y, acc, f);
    }
    const D d;
    for (int64_t jv = 0; jv < vectors_; ++jv) hn::Store(hn::Zero(d), d, acc + jv * kLanes);
    int64_t i = begin;
    if constexpr (kGroup > 1) {
      for (; i + 4 <= end; i += 4) SweepRows<4>(matrix, i, y, acc, f);
    }
    for (; i < end; ++i) SweepRows<1>(matrix, i, y, acc, f);
  }

  // The functor's results for R rows from i, each in all lanes, from what the rows' maxima are. `s`: partial maxima, a
  // vector per row. R: 1 or kGroup.
  template <int R, class F>
  HWY_INLINE static void MaximaOfRows(int64_t i, const V* s, V* results, F f) {
    Turn<R>(i, s, results, Larger(), f);
  }
  // x_i, x_i + 1, ... become the sums of R rows from their partial ones. R: 1 or kGroup.
  template <int R>
  HWY_INLINE static void StoreSums(const V* s, T* x, int64_t i) {
    if constexpr (R == 1) {
      Row<1>{i}.Store(hn::SumOfLanes(D(), s[0]), x);
    } else {
      Row<R>{i}.Store(FoldRows<R>(s, Plus()), x);
    }
  }

 private:
  // How the lanes of a row's partial results are combined.
  struct Plus {
    HWY_INLINE V operator()(V a, V b) const { return hn::Add(a, b); }
    HWY_INLINE V OfLanes(V v) const { return hn::SumOfLanes(D(), v); }
  };
  struct Larger {
    HWY_INLINE V operator()(V a, V b) const { return hn::Max(a, b); }
    HWY_INLINE V OfLanes(V v) const { return hn::MaxOfLanes(D(), v); }
  };

#if HWY_TARGET == HWY_SCALAR
  template <int R, class Fold>
  HWY_INLINE static V FoldRows(const V* s, Fold) {
    return s[0];
  }
#else
  // Within each block: lane k is what the block of s[k] comes to.
  template <class Fold>
  HWY_INLINE static V FoldWithinBlocks(const V* s, Fold fold) {
    const D d;
    V all = fold(hn::InterleaveLower(d, s[0], s[1]), hn::InterleaveUpper(d, s[0], s[1]));
    if constexpr (kGroup == 4) {
      const hn::Repartition<double, D> d64;
      const V other = fold(hn::InterleaveLower(d, s[2], s[3]), hn::InterleaveUpper(d, s[2], s[3]));
      const auto a = hn::BitCast(d64, all), b = hn::BitCast(d64, other);
      all = fold(hn::BitCast(d, hn::InterleaveLower(d64, a, b)), hn::BitCast(d, hn::InterleaveUpper(d64, a, b)));
    }
    return all;
  }
  // What the lanes of R vectors come to, repeated every R lanes. R: kGroup or kLanes.
  template <int R, class Fold>
  HWY_INLINE static V FoldRows(const V* s, Fold fold) {
    const D d;
    if constexpr (R == kGroup) {
      V all = FoldWithinBlocks(s, fold);
      if constexpr (kLanes > kGroup) all = fold(all, hn::SwapAdjacentBlocks(all));
      if constexpr (kLanes > 2 * kGroup) all = fold(all, hn::ConcatLowerUpper(d, all, all));
      return all;
    } else if constexpr (R == 2 * kGroup) {
      const V a = FoldWithinBlocks(s, fold), b = FoldWithinBlocks(s + kGroup, fold);
      return fold(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
    } else {
      static_assert(R == 4 * kGroup, "vectors of 128 to 512 bits");
      const V a = FoldPair(FoldWithinBlocks(s, fold), FoldWithinBlocks(s + kGroup, fold), fold);
      const V b = FoldPair(FoldWithinBlocks(s + 2 * kGroup, fold), FoldWithinBlocks(s + 3 * kGroup, fold), fold);
      return fold(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
    }
  }
  // Blocks a0 a1 a2 a3 and b0 b1 b2 b3 -> a0 + a1, b0 + b1, a2 + a3, b2 + b3.
  template <class Fold>
  HWY_INLINE static V FoldPair(V a, V b, Fold fold) {
    return fold(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
  }
#endif

  // The functor's results w for R rows from i, each in all lanes, from the rows' partial results s. R: 1 or a multiple
  // of kGroup.
  template <int R, class Fold, class F>
  HWY_INLINE static void Turn(int64_t i, const V* s, V* w, Fold fold, F f) {
    if constexpr (R == 1) {
      w[0] = f(Row<1>{i}, fold.OfLanes(s[0]));
    } else {
      SINKHORN_UNROLLED for (int r = 0; r < R; r += kGroup) {
        const V group = f(Row<kGroup>{i + r}, FoldRows<kGroup>(s + r, fold));
        w[r] = hn::Broadcast<0>(group);
        w[r + 1] = hn::Broadcast<1>(group);
        if constexpr (kGroup == 4) {
          w[r + 2] = hn::Broadcast<2>(group);
          w[r + 3] = hn::Broadcast<3>(group);
        }
      }
    }
  }

  template <int R, class F>
  HWY_INLINE void SweepRows(const T* matrix, int64_t i, const T* y, T* acc, F f) const {
    const D d;
    const T* HWY_RESTRICT row[R];
    V s[R], w[R];
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      row[r] = matrix + (i + r) * stride();
      s[r] = hn::Zero(d);
    }
    for (int64_t first = 0; first < stride(); first += kPanelVectors * kLanes) {
      V part[R];
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) part[r] = hn::Zero(d);
      for (int64_t j = first; j < std::min(first + kPanelVectors * kLanes, stride()); j += kLanes) {
        const V yj = hn::Load(d, y + j);
        SINKHORN_UNROLLED for (int r = 0; r < R; ++r) part[r] = hn::MulAdd(hn::Load(d, row[r] + j), yj, part[r]);
      }
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) s[r] = hn::Add(s[r], part[r]);
    }
    Turn<R>(i, s, w, Plus(), f);
    for (int64_t j = 0; j < stride(); j += kLanes) {
      V sum = hn::Mul(hn::Load(d, row[0] + j), w[0]);
      SINKHORN_UNROLLED for (int r = 1; r < R; ++r) sum = hn::MulAdd(hn::Load(d, row[r] + j), w[r], sum);
      SINKHORN_UNROLLED for (int r = 0; r < R; ++r) hwy::Prefetch(row[r] + R * stride() + j);  // The next turn's.
      hn::Store(hn::Add(hn::Load(d, acc + j), sum), d, acc + j);
    }
  }

  // Rows of C vectors: y and acc stay in registers.
  template <int C, class F>
  HWY_INLINE void SweepNarrow(const T* matrix, int64_t begin, int64_t end, const T* y_in, T* acc_out, F f) const {
    const D d;
    V y[C], acc[C];
    SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
      y[c] = hn::Load(d, y_in + c * kLanes);
      acc[c] = hn::Zero(d);
    }
    int64_t i = begin;
    if constexpr (kGroup > 1) {
      i = ManyNarrowRows<C>(matrix, begin, end, y, acc, f);
      for (; i + 4 <= end; i += 4) NarrowRows<4, C>(matrix, i, y, acc, f);
    }
    for (; i < end; ++i) NarrowRows<1, C>(matrix, i, y, acc, f);
    SINKHORN_UNROLLED for (int c = 0; c < C; ++c) hn::Store(acc[c], d, acc_out + c * kLanes);
  }
  template <int R, int C, class F>
  HWY_INLINE static void NarrowRows(const T* matrix, int64_t i, const V* y, V* acc, F f) {
    const D d;
    const T* HWY_RESTRICT rows = matrix + i * C * kLanes;
    V s[R], w[R];
    SINKHORN_UNROLLED for (int r = 0; r < R; ++r) {
      s[r] = hn::Mul(hn::Load(d, rows + r * C * kLanes), y[0]);
      SINKHORN_UNROLLED for (int c = 1; c < C; ++c) {
        s[r] = hn::MulAdd(hn::Load(d, rows + (r * C + c) * kLanes), y[c], s[r]);
      }
    }
    Turn<R>(i, s, w, Plus(), f);
    SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
      V sum = hn::Mul(hn::Load(d, rows + c * kLanes), w[0]);
      SINKHORN_UNROLLED for (int r = 1; r < R; ++r) sum =
          hn::MulAdd(hn::Load(d, rows + (r * C + c) * kLanes), w[r], sum);
      acc[c] = hn::Add(acc[c], sum);
    }
  }

  // As many rows at a time as lanes, so that their sums fill a vector; the results reach their rows through memory,
  // while the next rows are summed. Returns the first row that is left.
  template <int C, class F>
  HWY_INLINE static int64_t ManyNarrowRows(const T* matrix, int64_t begin, int64_t end, const V* y, V* acc, F f) {
    constexpr int kRows = static_cast<int>(kLanes);
    HWY_ALIGN T w[2][kRows];
    int64_t i = begin;
    for (int turn = 0; i + kRows <= end; i += kRows, turn ^= 1) {
      hn::Store(f(Row<kRows>{i}, SumNarrowRows<C>(matrix + i * C * kLanes, y)), D(), w[turn]);
      asm volatile("" : : "r"(&w) : "memory");  // Else the compiler shuffles the elements out of the vector.
      if (i > begin) AddNarrowRows<C>(matrix + (i - kRows) * C * kLanes, w[turn ^ 1], acc);
    }
    if (i > begin) AddNarrowRows<C>(matrix + (i - kRows) * C * kLanes, w[(i - begin) / kRows % 2 ^ 1], acc);
    return i;
  }
  template <int C>
  HWY_INLINE static V SumNarrowRows(const T* HWY_RESTRICT rows, const V* y) {
    const D d;
    V s[kLanes];
    SINKHORN_UNROLLED for (int r = 0; r < kLanes; ++r) {
      s[r] = hn::Mul(hn::Load(d, rows + r * C * kLanes), y[0]);
      SINKHORN_UNROLLED for (int c = 1; c < C; ++c) {
        s[r] = hn::MulAdd(hn::Load(d, rows + (r * C + c) * kLanes), y[c], s[r]);
      }
    }
    return FoldRows<static_cast<int>(kLanes)>(s, Plus());
  }
  // acc += the rows times w, in two chains.
  template <int C>
  HWY_INLINE static void AddNarrowRows(const T* HWY_RESTRICT rows, const T* w, V* acc) {
    const D d;
    V sum[2][C];
    SINKHORN_UNROLLED for (int r = 0; r < kLanes; ++r) {
      const V one = hn::Set(d, w[r]);
      SINKHORN_UNROLLED for (int c = 0; c < C; ++c) {
        const V entry = hn::Load(d, rows + (r * C + c) * kLanes);
        sum[r % 2][c] = r < 2 ? hn::Mul(entry, one) : hn::MulAdd(entry, one, sum[r % 2][c]);
      }
    }
    SINKHORN_UNROLLED for (int c = 0; c < C; ++c) acc[c] = hn::Add(acc[c], hn::Add(sum[0][c], sum[1][c]));
  }

  int64_t rows_, cols_, vectors_;
};

}  // namespace sinkhorn::cpu::normalization::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SINKHORN_KERNELS_CPU_NORMALIZATION_LAYOUT_INL_H_
