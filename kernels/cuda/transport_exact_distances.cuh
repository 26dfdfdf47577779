// Weights by distance, P_ij / |x_i - y_j|, of exact tiles (transport_exact_tiles.cuh): what gradients to points whose
// cost is |x - y| are sums by. Squared distances are made of products, and of coordinates where those cancel; distances
// are multiplied by the exponents' scale, and weights lack it.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_DISTANCES_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_DISTANCES_CUH_

#include <cfloat>

#include "kernels/cuda/transport_exact_tiles.cuh"

namespace sinkhorn {
namespace cuda {

#if SINKHORN_HOPPER

// Of the tiles' products.
__device__ inline double DistanceFactor(double scale) { return -2 * scale * scale; }

// Squared norms of a side's points, times a factor.
struct Norms {
  const double* norm2;
  int count;
  double factor;
  __device__ double operator()(int i) const { return factor * norm2[min(i, count - 1)]; }
};

template <typename Tiles>
class Distances {
 public:
  struct Memory {
    alignas(16) double columns[2][Tiles::kColumns];  // What columns add to exponents, of two tiles.
    double2 rows[kTile];                             // What rows do, and below which squares are made anew.
  };

  // All threads of the block; sides.factor: a DistanceFactor.
  __device__ Distances(const Member& member, int own, int other, const ExactSides& sides, const ExactTerms& terms,
                       const double* phi, Memory* memory)
      : sides_(sides),
        terms_(terms),
        rows_{member.At<double>(member.job.at.length[own]), sides.rows, terms.scale * terms.scale},
        columns_{member.At<double>(member.job.at.length[other]), sides.columns, terms.scale * terms.scale},
        memory_(memory) {
    constexpr double kNear = 0x1p-16;  // Of a row's norm: such distances are made anew, since products cancel.
    if (threadIdx.x >= kTile) return;  // Read after a tile's barriers.
    const int row = static_cast<int>(threadIdx.x);
    memory_->rows[row] =
        make_double2(StartOfRow(sides_, terms_, phi, member.mass(own), row), kNear * rows_(sides_.first_row + row));
  }

  // walk(start, columns, begin, use) goes through tiles, as their Each does with these; of each two neighbours
  // use(r, weight of the first, of the second, begin(tile, column of the tile)): floats, to be multiplied by the scale.
  template <typename Walk, typename Begin, typename Use>
  __device__ void EachWeight(Walk walk, Begin begin, Use use) const {
    EachPair(walk, begin, [&](int r, double first, double second, double start, const auto& of) {
      if (__any_sync(0xffffffffu, IsNear(r, first) || IsNear(r, second))) {
        if (IsNear(r, first)) first = SquareAnew(r, of.column);
        if (IsNear(r, second)) second = SquareAnew(r, of.column + 1);
        __syncwarp();
      }
      use(r, WeightOrNone(first, start + of.terms.x), WeightOrNone(second, start + of.terms.y), of.begun);
    });
  }

  // The same, without a branch at each pair. Weights that were wrong for being near are made anew after a tile:
  // again(r, column, weight). walk(start, columns, begin, use, share), as their Each.
  template <typename Walk, typename Begin, typename Use, typename Again>
  __device__ void EachWeightMended(Walk walk, Begin begin, Use use, Again again) const {
    static_assert(Tiles::kRows * 8 <= 32, "a bit for each pair of a tile");
    uint32_t near = 0;  // Of a tile's pairs, the last one's lowest.
    int near_tile = 0;
    const auto mend = [&] {
      for (; __any_sync(0xffffffffu, near != 0); near &= near - 1) {
        if (near == 0) continue;
        const int pair = Tiles::kRows * 8 - __ffs(static_cast<int>(near)), r = pair / 2 % Tiles::kRows;
        const int column = 32 * Tiles::Group() + pair / 2 / Tiles::kRows * 8 + threadIdx.x % 4 * 2 + pair % 2;
        const int j = near_tile * Tiles::kColumns + column;
        const double exponent = memory_->rows[Tiles::Row(r)].x + terms_(j);
        again(r, j, WeightOrNone(SquareAnew(r, j), exponent));
      }
    };
    EachPair(
        [&](const double(&start)[Tiles::kRows], auto* columns, auto begin_tile, auto use_pair) {
          walk(start, columns, begin_tile, use_pair, [&](int tile) {
            mend();
            near_tile = tile;
          });
        },
        begin,
        [&](int r, double first, double second, double start, const auto& of) {
          near = near << 2 | (IsNear(r, first) ? 2u : 0u) | (IsNear(r, second) ? 1u : 0u);
          use(r, Weight(first, start + of.terms.x), Weight(second, start + of.terms.y), of.begun);
        });
    mend();
  }

 private:
  // use(r, squares of two neighbours, what the row's exponents begin with, what columns have).
  template <typename Walk, typename Begin, typename Use>
  __device__ void EachPair(Walk walk, Begin begin, Use use) const {
    struct Of {
      decltype(begin(0, 0)) begun;
      double2 terms;
      int column;
    };
    double start[Tiles::kRows];
#pragma unroll
    for (int r = 0; r < Tiles::kRows; ++r) start[r] = rows_(sides_.first_row + Tiles::Row(r));
    TermsBeside columns(columns_, terms_, memory_->columns);
    walk(
        start, &columns,
        [&](int tile, int slot, int column) {
          const double2 terms = *reinterpret_cast<const double2*>(&memory_->columns[slot][column]);
          return Of{begin(tile, column), terms, tile * Tiles::kColumns + column};
        },
        [&](int r, double first, double second, const Of& of) {
          use(r, first, second, memory_->rows[Tiles::Row(r)].x, of);
        });
  }
  // By the upper words, which is a little more.
  __device__ bool IsNear(int r, double square) const {
    return __double2hiint(square) <= __double2hiint(memory_->rows[Tiles::Row(r)].y);
  }
  // Of a pair whose squared distance is that, by the exponent that its potentials add up to. Matrix units make float64
  // wait: a root is rough, and what it lacks is a float.
  __device__ static float Weight(double square, double exponent) {
    double inverse;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(square));  // To 20 binary digits or so.
    const double root = square * inverse;
    const float error = static_cast<float>(fma(-root, inverse, 1)), lack = error * fmaf(0.375f, error, 0.5f);
    const float density = FixedPoint::Saturated(exponent - root, -lack * static_cast<float>(root));
    const float rough = fminf(static_cast<float>(inverse), FLT_MAX);
    return density * fmaf(lack, rough, rough);
  }
  // None where points coincide.
  __device__ static float WeightOrNone(double square, double exponent) {
    return square > 0 ? Weight(fmax(square, 1e-300), exponent) : 0;
  }
  __device__ double SquareAnew(int r, int j) const {
    const double* x = sides_.x + int64_t{min(sides_.first_row + Tiles::Row(r), sides_.rows - 1)} * sides_.dim;
    const double* y = sides_.y + int64_t{min(j, sides_.columns - 1)} * sides_.dim;
    double sum = 0;
    for (int k = 0; k < sides_.dim; ++k) {
      const double difference = x[k] - y[k];
      sum = fma(difference, difference, sum);
    }
    return terms_.scale * terms_.scale * sum;
  }

  const ExactSides& sides_;
  const ExactTerms& terms_;
  const Norms rows_, columns_;
  Memory* const memory_;
};

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_EXACT_DISTANCES_CUH_
