// Hessian-vector products of a transport value in its points, streamed: nothing n x m but densities that fit the cache.
//
// The gradient is sum_j P_ij grad C_ij. Along directions (dx, dy) its derivative needs that of the plan,
//   dP_ij = P_ij (df_i + dg_j - dC_ij) / eps,   dC_ij = <grad_x C_ij, dx_i> + <grad_y C_ij, dy_j>,
// whose potentials follow from differentiating the fixed point (row sums of P = a exp(-f / rho_a), columns likewise):
//   (r_i + p_i) df_i + sum_j P_ij dg_j = sum_j P_ij dC_ij,      p_i = (eps / rho_a) a_i exp(-f_i / rho_a), 0 balanced,
//   sum_i P_ij df_i + (c_j + q_j) dg_j = sum_i P_ij dC_ij,      r = P 1, c = P^T 1
// (implicit function theorem; Luise, Rudi, Pontil & Ciliberto 2018, Eisenberger et al. 2022). Costs here are bilinear
// up to terms of rows and columns, dC_ij = u_i + v_j + D_ij with D_ij = -2 kappa (<dx_i, y_j> + <x_i, dy_j>) of centred
// points, and df - u, dg - v solve the same equations with D, less p_i u_i and q_j v_j on the right: nothing large
// cancels. df is eliminated, and dg found by conjugate gradients on the Schur complement
//   S = diag(c + q) - P^T diag(r + p)^-1 P,
// which is singular along constants when both sides are balanced: residuals and steps have them projected out.
//
// The product is then sum_j dP_ij grad_x C_ij + sum_j P_ij d(grad_x C_ij): one with dP and one with P. Where sums of dP
// are known, -p_i df_i / eps, they are used: away from the solution this is the derivative of the fixed point's
// gradient.
// Costs: squared Euclidean (cosine: of points on the sphere) and negative dot.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_HESSIAN_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_HESSIAN_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/buffer.h"
#include "kernels/cpu/transport_answer.h"
#include "kernels/cpu/transport_cost.h"
#include "kernels/cpu/transport_state.h"
#include "kernels/cpu/work.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

// What the products are of. All outlives them.
template <typename TE, typename T>
struct HessianProblem {
  const CostSource<TE, T>* cost;
  const TransportState<TE, T>* state;  // At the solution.
  const TransportAnswer* answer;
  const Cloud* cloud[2];
  const TransportInputs* inputs;
  const double* direction[2];  // [count, size, dim] each, or null for 0
  bool wanted[2];              // Whose products.
  int64_t cache_bytes;         // The plan is kept if it fits.
};

// Products in phases of chunks (work.h), all directions in each sweep.
template <typename TE, typename T>
class TransportHessian {
 public:
  explicit TransportHessian(const HessianProblem<TE, T>& problem);

  int64_t chunk_count() const { return phase_ == Phase::kDone ? 0 : slots_; }
  int64_t chunk_pairs() const { return chunk_blocks_ * kRowBlock * cost_.padded(1 - side()); }
  bool cached() const { return plan_valid_; }
  void RunChunk(int64_t chunk, Scratch* scratch);
  void EndPhase();

  // REQUIRES: finished. [count, size, dim] of a side that is wanted.
  const Buffer<double>& product(int side) const { return product_[side]; }
  const HessianConvergence& convergence() const { return convergence_; }  // The worst direction's.

 private:
  // Setup: what D does to rows and columns, and the diagonal of S. Reduce: the right-hand side of the columns.
  // Multiply: S times the steps. Neumann: a term of the preconditioner. Check: S times the solution, and df from it.
  enum class Phase { kSetup, kReduce, kMultiply, kNeumann, kCheck, kRows, kColumns, kDone };

  struct Direction {
    Buffer<double> shift[2];      // u, v
    Buffer<double> right[2];      // of the two equations; right[1] becomes that of the complement
    Buffer<double> potential[2];  // df - u, dg - v
    Buffer<double> residual, step, conditioned;
    double norm = 0, inner = 0, checked = 0;
    int32_t iterations = 0;
    bool active = true;
  };

  int side() const { return phase_ == Phase::kColumns ? 1 : 0; }
  const double* given(int side, int64_t index) const {
    const double* steps = problem_.direction[side];
    return steps == nullptr ? nullptr : steps + index * cost_.size(side) * dim_;
  }
  void Start(Phase phase);
  void StartSchur(Phase phase, Buffer<double> Direction::*source);
  void StartOutput(Phase phase);
  void SetShifts(int64_t index);

  struct Memory;
  void RunBlock(int64_t row, T* acc, Scratch* scratch);
  void MakeBent(const int64_t* rows, int64_t index, Memory* memory) const;
  void SetupBlock(const int64_t* rows, T* acc, Memory* memory);
  void SchurBlock(const int64_t* rows, T* acc, const Memory& memory);
  void OutputBlock(const int64_t* rows, Memory* memory);

  double Column(int64_t index, int64_t j) const;
  void EndSetup();
  void EndReduce();
  void EndMultiply();
  void EndNeumann();
  void EndCheck();
  void Condition();
  void TakeSteps();
  void Finish(Phase after);
  double Norm(const Buffer<double>& residual) const;
  void Project(Buffer<double>* residual) const;
  bool any_active() const;

  const HessianProblem<TE, T> problem_;
  const CostSource<TE, T>& cost_;
  const HessianInputs& options_;
  const TransportKernels<TE, T>& kernels_ = GetTransportKernels<TE, T>();
  const int64_t dim_, count_, width_;
  const bool dot_;
  const double factor_;  // 2 kappa
  const double epsilon_;
  const bool balanced_;

  Phase phase_ = Phase::kSetup;
  int64_t slots_ = 1, chunk_blocks_ = 1, step_ = 0, steps_ = 1;
  int neumann_left_ = 0;
  Buffer<double> extra_[2], diagonal_[2];  // p, q;  r + p, c + q
  Buffer<double> jacobi_;                  // The diagonal of S.
  std::vector<Direction> directions_;
  Buffer<T> acc_;      // [slots, count + 1, padded columns]
  Buffer<T> sources_;  // [count, padded columns]: what a Schur sweep multiplies the plan with
  Buffer<T> ones_;
  std::vector<Buffer<TE>> bend_;        // Packed [other side's points, its steps], for D.
  std::vector<Buffer<TE>> terms_;       // The other side's potentials, negative, for dP; else 0.
  std::vector<Buffer<T>> point_steps_;  // [padded other side, width]
  Buffer<T> points_;
  Buffer<T> plan_;  // The plan's blocks, if they fit.
  bool plan_valid_ = false;
  Buffer<double> product_[2];
  HessianConvergence convergence_;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_HESSIAN_H_
