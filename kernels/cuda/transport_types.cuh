// What the transport kernels share: a resident problem as the device sees it, and the state of its solves.
//
// A job is a resident problem: `count` members of one shape. Each member is solved by one engine (OT(a, b)), debiased
// ones by three (also OT(a, a) and OT(b, b)), all at once. Side 0 of an engine has the rows, side 1 the columns.
//
// Potentials phi are kept in double, in units of the cost, without the part that the points' centring and norms absorb:
//   f_i = phi_i + shift_i;  P_ij = 2^(z_ij + phi_i s + phi_j s + log2 a_i + log2 b_j),  s = log2(e) / epsilon.
// z_ij is a member's exponent without the terms of row and column, in one of three arithmetics:
//   kFloat   STRICT: float32; clouds 2 kappa s <x_i, y_j>, centred; dense -C_ij s.
//   kMixed   STRICT where the cost spans too many epsilons for that: z in float64, 2^z in float32.
//   kDouble  DOUBLE: float64; clouds -kappa s |x_i - y_j|^2, which does not cancel for clusters far apart.
// The other costs of points are that one in disguise (kernels/cpu/transport_cost.h), a job's kappa 1/2:
//   -<x, y>        has other shifts.
//   1 - cos(x, y)  is that of points on the unit sphere, where the preparation puts them.
// but for |x - y|: both clouds are centred on one point, potentials are whole, z_ij is -s |x_i - y_j|; in float32 made
// from differences or, of many coordinates, from products (transport_cloud_distances.cu).
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_TYPES_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_TYPES_CUH_

#include <cstdint>

#include "kernels/problem.h"

namespace sinkhorn {
namespace cuda {

constexpr int kThreads = 256;                  // Of every block here, unless a kernel says otherwise.
constexpr int kMostWarps = 32;                 // Of any block.
constexpr int kTile = 64;                      // Rows of a block; columns of a step.
constexpr int kProcessors = 132;               // Of an H200.
constexpr int kSplitBlocks = 2 * kProcessors;  // Of a pass over one engine at least.
constexpr double kLog2E = 1.4426950408889634074;
constexpr double kVoid = -1e30;               // The log2 of no mass.
constexpr double kFloatExponentMax = 400;     // Cost over epsilon up to which float32 exponents serve STRICT.
constexpr double kCloudExponentMax = 4000;    // Of clouds whose products are, by a sample, far below their bound.
constexpr double kDotExponentMax = 1800;      // Of negative dots, times parts of 16 coordinates.
constexpr double kRootExponentMax = 140;      // Of distances made from products: nearer points are made anew.
constexpr double kFloatExponentError = 4e-8;  // Of a density, for each unit of cost over epsilon.
constexpr double kAnnealedError = 5e-5;       // That earlier epsilons may leave, in units of the last.

enum Mode : int { kFloat = 0, kMixed = 1, kDouble = 2 };
constexpr Mode kModes[] = {kFloat, kMixed, kDouble};

// What a pass over an engine's rows (or columns) is for.
enum class Pass : int {
  kIterate,  // A half step.
  kMeasure,  // The sums of P at the final potentials.
  kBound,    // Sums of the plan as the primal bound rounds it, in double: side 0, side 1, side 0.
};

// Where things lie in a member's part of the workspace, in bytes from its start.
struct Layout {
  int64_t state;             // EngineState[engines]
  int64_t arrivals;          // unsigned[engines][arrival_stride]: one per row block, then one of the engine
  int64_t arrival_stride;    // unsigneds
  int64_t mass[2];           // double[n]
  int64_t log_mass[2];       // double[n], kVoid where there is none
  int64_t linear[2];         // double[n]: the shift's part that whole distances lack; engine 0 only
  int64_t self_linear[2];    // double[n]: of x's and of y's own problem; debiased negative dots only
  int64_t norm2[2];          // double[n]: the rest: kappa |x|^2, centred
  int64_t length[2];         // double[n]: cosines: of the points as given; distances: |x|^2, centred
  int64_t gradient[2];       // double[n, dim]: to the points on the sphere; cosines with gradients
  int64_t centre[2];         // double[dim]
  int64_t points64[2];       // double[n, dim], centred
  int64_t points32[2];       // float[n, dim], centred (not for DOUBLE)
  int64_t halves[2];         // The same, scaled, as sums of halves: transport_cloud.cuh (not for DOUBLE)
  int64_t phi[3][2][2];      // [engine][parity][side]: double[size]
  int64_t ratio[3][2];       // [engine][side]: double[size], marginal / mass
  int64_t partial[3];        // [engine]: double[splits, rows], log2 sums
  int64_t stream_sums[3];    // [engine]: float[StreamSlabs or kProcessors, StreamColumns]; streamed jobs. Of engines 1
                             // and 2 that are held: scales, of two turns. Of those that are apart: SymmetricBytes
  int64_t stream_terms[3];   // [engine]: float[StreamColumns]; of those that are apart, SymmetricColumns
  int64_t stream_scales;     // float[StreamColumns] of engine 0; jobs that may be held or looped
  int64_t loop_totals;       // uint64_t[3, padded n]: of rows: sums, and how many blocks' they are; LoopsClouds
  int64_t loop_frames;       // float[3, padded n]: terms of rows
  int64_t joint_told;        // double[2, kJointTold, kProcessors]; jobs that IsJoint
  int64_t stream_reference;  // double: what columns' potentials are seen from
  int64_t exponents[3];      // [engine]: float, of FAST half or Density [rows, StreamColumns]; jobs that HasNumbers
  int64_t frame[3][2];       // [engine][side]: double[size]: the phi that they were made at
  int64_t exact[3];          // [engine]: double[rows, ExactColumns]: z, at the last epsilon; jobs that IsExactOnChip
  int64_t stats[3][2];       // [engine][side]: BlockStats[row blocks]
  int64_t anderson;          // AndersonState; jobs that are accelerated
  int64_t anderson_vectors;  // double[2 + 2 kAndersonWindow, m]
  int64_t chunk_stats;       // ChunkStats of the preparation
  int64_t chunk_sums[2];     // double[chunks, 3, dim]: sums, minima, maxima of coordinates
  int64_t linear_value;      // double[LinearParts]: sum P z, or sum P C
  int64_t row_mass;          // double[n, OutputSplits]: of entries found; sparse plans
  int64_t row_counts;        // int[n, OutputSplits]: likewise, their numbers; then the first's place in its row
  int64_t bound_psi[2], bound_log_weight[2], bound_lack[2], bound_partial, bound_stats;
  int64_t densities;  // Of a chunk of rows, as matrix fragments (transport_gradient_wide.cu), or sums (.._even.cu);
                      // weights (transport_weights.cuh)
  int64_t bytes;      // Of a member.
};

// One resident problem. Passed by address in device memory; plain data. Aligned as its copies in shared memory: behind
// one of an odd number of words half steps of distances spill.
struct alignas(16) Job {
  int64_t count;
  int32_t size[2];  // n, m
  int32_t dim;
  int32_t engines;  // 1 or 3
  bool dense, symmetric, starting, relaxing, wants_bound;
  bool hopper;                // Kernels for it are there.
  bool wide_clusters;         // Clusters of kOnChipRanksMost blocks can be had.
  bool streamed;              // transport_stream.cu, in float32; clouds when their exponents are kept.
  bool held;                  // Its first iterations then are made on the chip: transport_stream_held.cu.
  bool looped;                // All but the first then are made in launches of many: transport_{stream,cloud}_loop.cu.
  bool looped_beside;         // Those of engine 0 are, before the others' passes, or beside their launches.
  bool loops_symmetric;       // Engines whose sides move at once have launches of their own: transport_symmetric.cu.
  bool framed;                // The same in kMixed, from exponents in frames that are renewed.
  bool finish_soon;           // The iteration that comes is the last.
  bool halves;                // Clouds are there as halves.
  bool lean;                  // In no other way, unless the data need more than float32.
  int8_t cloud_splits[3][2];  // [engine][side], for Geometry::kCloud
  int8_t exact_splits[3][2];  // and kExact.
  int32_t weight_items[2];    // [side]: of a chunk of weights; transport_weights.cuh
  bool odd_before;            // Whether an odd number of passes came before this slice.
  Precision precision;
  TransportInputs in;  // kappa: of any cost of points.
  SolverOptions solver;
  Outputs out;
  char* workspace;
  Layout at;
  int64_t turn_first, turn_members;  // Those that this slice serves, where they are held or looped.
};

// Partial results of one row block.
struct BlockStats {
  double error;      // sum mass |ratio - target|
  double dual;       // sum mass f, or its relaxed form
  double plan_mass;  // sum mass ratio
  double largest;    // |phi s|
  double terms;      // sum |mass f|
  double finite;     // 1 if all potentials are
};

// Of a chunk of points or costs, from the preparation.
struct ChunkStats {
  double low, high;  // Costs; points: the largest norm^2 in `high`.
  double mass;
};

// Automatic over-relaxation: kernels/cpu/relaxation.h says what it does and why.
struct RelaxationState {
  double weight, ceiling, log_sum, previous_mean;
  int32_t count, settled, plain, skipped;
};

// Anderson acceleration: kernels/cpu/anderson.h says what it does and why.
constexpr int kAndersonWindow = 8;
constexpr int kJointTold = 2 * kAndersonWindow + 2;  // Sums that blocks tell each other: transport_joint.cuh.
struct AndersonProgress {
  int32_t active, fresh, count, iterations, restarts, skipped;
  double trial, least;
};
struct AndersonState {
  AndersonProgress progress;
  double gram[kAndersonWindow][kAndersonWindow];
};

// EngineState::kept. Of densities that the columns' first half step has stored: all can be used, or not all. From when
// sweeps or loops may read what is kept: another bit.
constexpr int kFirstStored = 1, kFirstRefused = 2, kKept = 4;

struct EngineState {
  double epsilon;                // Of the iteration in progress.
  double relax, previous_relax;  // Of the iteration in progress and of the one before.
  RelaxationState relaxation;
  double error[2];
  double best_error;
  double total_mass[2];
  double cost_max;
  double cost_rounding;  // FAST: how far costs may be from those of the points as given.
  double point_scale;    // Of the points as halves: a power of two.
  int32_t best_iteration;
  int32_t iterations;
  int32_t parity;    // Which phi are the present ones.
  int32_t starting;  // Symmetric: the half steps from zero, not yet an iteration.
  int32_t fresh;     // Epsilon has just changed: residuals tell nothing yet.
  int32_t stopped;
  int32_t kept;         // Exponents are (Layout::exponents): kKept.
  int32_t anderson;     // Columns are extrapolated as long as that pays; over-relaxation takes over then.
  int32_t extrapolate;  // These columns are to be.
  int32_t reason;       // StopReason
  int32_t mode;         // Mode at epsilon.
  int16_t converged;
  int16_t cut_short;  // Annealing was: perhaps no plan goes with the potentials.
  int8_t finite;
  int8_t fallen;     // Its sums have left the range of launches of many iterations: half steps go on, after all others.
  int8_t stored;     // Of looped jobs: all that was asked for is.
  uint8_t measured;  // By so many blocks of the kernel that made the last iterations; 0: as IsStreamed says.
  float float_epsilon;  // From which on float32 exponents serve: kFloat, below kMixed.
};

static_assert(kProcessors <= UINT8_MAX, "measured");

// What the host reads of a job after each slice.
struct JobReport {
  int32_t running;   // Engines that still iterate,
  int32_t looping;   // and those of them that launches of many iterations may,
  int32_t crossing;  // and of those engines 0.
  int32_t modes;     // 1 << Mode, over all engines.
  int32_t iterations;
  int32_t fewest;  // Of engines that still iterate.
  int32_t converged;
  int32_t reason;
  double error[2];
  int64_t diverged;  // The first member that is not finite, or -1.
  int32_t diverged_iterations;
};

// A launch over several jobs: block b belongs to job k with first_block[k] <= b < first_block[k + 1].
struct LaunchTable {
  const Job* jobs;
  const int64_t* first_block;  // [job_count + 1]
  int32_t job_count;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_TYPES_CUH_
