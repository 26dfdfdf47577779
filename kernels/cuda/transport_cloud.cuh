// How point clouds in float32 lie in the workspace for tensor cores, and how a block finds its part of them.
//
// A coordinate is the sum of two halves (22 bits), and high high + high low + low high is its product with float32's
// accuracy; FAST has one half. Tiles of kCloudTile points, for every kDepth coordinates of them one plane of each half,
// are what copies move: rows of row_bytes, swizzled as the matrix units read them. Points are padded with zeros.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_CUH_

#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {

// The matrix units truncate a sum whenever they add to it: by so much of the final sum each time, as measured against
// float64 at 64 to 1,024 coordinates, where making it good halves the potentials' error and more.
constexpr double kTruncation = 1.8e-8;

constexpr int kCloudThreads = 512;  // Four warpgroups of 64 rows.
constexpr int kGroups = 4;

constexpr int kPlaneAlignment = 1024;  // The longest swizzle's period, in bytes: of planes in shared memory.

// The byte where chunk `chunk` (16 bytes) of row `row` lies in a plane.
__host__ __device__ inline int SwizzledAt(int row, int chunk, int row_bytes) {
  const int at = row * row_bytes + chunk * 16;
  return at ^ ((at >> 7 & (row_bytes / 16 - 1)) << 4);
}

// What a column adds to exponents, before it is one number.
struct ColumnTerm {
  double phi, log_weight;
};

// What a block works on, in shared memory: registers are short.
struct CloudContext {
  RowBlock block;
  const char *x, *y;        // Planes of the rows' and of the columns' cloud.
  const double* phi_of[2];  // Of the columns, by the state's parity.
  const double* own_phi_of[2];
  const double* phi;  // Of the columns, as the two that follow.
  const double* log_weight;
  double reference, scale;
  float factor;  // From products of scaled halves to exponents.
  double epsilon, unscaled_factor;
  int columns, first_tile, last_tile;
  const double* own_phi;  // Of the rows; their shift is the sum of two, either of which may be null.
  const double* shifts[2];
  double damping;
  int rows, first_row, own_side;
  int depths, last_steps;  // Parts of kDepth coordinates; matrix products that the last takes.
  int row_bytes, plane_bytes;

  // What a row's log2 sum of these columns' densities would be if its potential, `phi`, stayed.
  __device__ float ExpectedLevel(int i, double phi) const {
    const double half_step = damping == 1 ? phi : (phi + Shift(i)) / damping - Shift(i);
    return static_cast<float>(-(half_step + reference) * scale);
  }
  __device__ bool IsRow(int row) const { return first_row + row < rows; }
  // Rows outside are as the last.
  __device__ int Row(int row) const { return min(first_row + row, rows - 1); }
  __device__ ColumnTerm LoadTerm(int j) const { return LoadTerm(phi, j, reference); }
  __device__ ColumnTerm LoadTerm(const double* phi, int j, double reference) const {
    return j < columns ? ColumnTerm{phi[j], log_weight[j]} : ColumnTerm{reference, kVoid};
  }
  // As transport_tile.cuh's, seen from `level`.
  __device__ float TermOf(const ColumnTerm& term, float level = 0) const {
    return static_cast<float>(fma(term.phi - reference, scale, term.log_weight) - level);
  }
  __device__ double Shift(int i) const {
    return (shifts[0] != nullptr ? shifts[0][i] : 0) + (shifts[1] != nullptr ? shifts[1][i] : 0);
  }
  // All planes of a tile's coordinates, which lie together.
  __device__ const char* RowTile(int tile, int depth, int planes) const {
    return x + (int64_t{tile} * depths + depth) * planes * plane_bytes;
  }
  __device__ const char* ColumnTile(int tile, int depth, int planes) const {
    return y + (int64_t{tile} * depths + depth) * planes * plane_bytes;
  }
};

// From products of scaled halves to exponents, but for the scale of the points: its square divides it. What truncation
// takes off is made good; `early`: of the additions, those to sums that are still small.
__device__ inline double UnscaledFactor(const Job& job, double scale, int early = 0) {
  const double kept = 1 + kTruncation * ((PlanesOf(job) == 2 ? 3 : 1) * CeilDiv(job.dim, 16) - early);
  return 2 * job.in.kappa * scale * kept;
}
__device__ inline double ProductFactor(double unscaled, double point_scale) {
  const double inverse = __hiloint2double(0x7fe00000 - __double2hiint(point_scale), 0);  // Of a power of two.
  return unscaled * inverse * inverse;
}

__device__ inline void FillEpsilon(const Member& member, double epsilon, CloudContext* c) {
  const double rho = RhoOf(member.job, c->block.engine, c->own_side);
  c->epsilon = epsilon;
  c->scale = kLog2E / epsilon;
  c->unscaled_factor = UnscaledFactor(member.job, c->scale);
  c->damping = DampingOf(epsilon, rho);
}
// What the job alone decides. By one thread; kIterate and kMeasure.
__device__ inline void FillShape(const Member& member, const RowBlock& b, int side, Pass pass, CloudContext* c) {
  const Job& job = member.job;
  const int other = MeasureOf(b.engine, 1 - side);
  c->block = b;
  c->x = member.At<char>(job.at.halves[MeasureOf(b.engine, side)]);
  c->y = member.At<char>(job.at.halves[other]);
  c->columns = job.size[other];
  c->shifts[0] = member.Linear(b.engine, side);
  c->shifts[1] = member.At<double>(job.at.norm2[MeasureOf(b.engine, side)]);
  c->rows = EngineSize(job, b.engine, side);
  c->own_side = side;
  c->first_row = b.block * kCloudRows;
  const int64_t tiles = CeilDiv(c->columns, kCloudTile);
  c->first_tile = static_cast<int>(tiles * b.split / b.splits);
  c->last_tile = static_cast<int>(tiles * (b.split + 1) / b.splits);
  c->row_bytes = CloudRowBytes(job.dim);
  c->plane_bytes = kCloudTile * c->row_bytes;
  c->depths = CloudDepths(job.dim);
  c->last_steps = static_cast<int>(CeilDiv(job.dim - (c->depths - 1) * kDepth, 16));
  for (int parity = 0; parity < 2; ++parity) {
    const PassView view = ViewOf(member, b.engine, side, pass, parity);
    c->phi_of[parity] = side == 0 ? view.phi[1] : view.phi[0];
    c->log_weight = side == 0 ? view.log_weight[1] : view.log_weight[0];
    c->own_phi_of[parity] = member.phi(b.engine, parity, side);
  }
  FillEpsilon(member, job.solver.epsilon, c);
}
// The rest, which a pass changes. By one thread, after FillShape.
__device__ inline void FillState(const Member& member, CloudContext* c) {
  const EngineState* state = member.state(c->block.engine);
  if (state->epsilon != c->epsilon) FillEpsilon(member, state->epsilon, c);  // While it is annealed.
  c->phi = c->phi_of[state->parity];
  c->own_phi = c->own_phi_of[state->parity];
  c->reference = c->phi[0];
  c->factor = static_cast<float>(ProductFactor(c->unscaled_factor, state->point_scale));
}

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_CLOUD_CUH_
