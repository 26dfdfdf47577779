// The Hessian-vector products of a transport member: of its own problem and, debiased, less those of the self problems;
// for cosines by the chain rule through the normalisation.
//
//   x = p / |p|,  J = (1 - x x^T) / |p|.  Along dp, x moves by w = J dp, and the gradient J g of the points p by
//   J (dg) - (w <x, g> + x <w, g>) / |p| - <x, dp> / |p| J g,   dg the product on the sphere, g the gradient there.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_DIRECTIONS_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_DIRECTIONS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/transport_hessian.h"
#include "kernels/cpu/transport_inputs.h"

namespace sinkhorn::cpu {

// A problem that has been solved: a member's own, OT(a, a) or OT(b, b), in this order.
template <typename TE, typename T>
struct SolvedProblem {
  const CostSource<TE, T>* cost;
  const TransportState<TE, T>* state;
  const TransportAnswer* answer;
};

template <typename TE, typename T>
class HessianStage {
 public:
  // `gradient`: of x and y, cosines: on the sphere. All outlives the stage.
  HessianStage(const MemberInputs* inputs, const std::vector<SolvedProblem<TE, T>>& problems,
               const Buffer<double>* gradient, int64_t cache_bytes);

  int64_t chunk_count() const { return current_ == nullptr ? 0 : current_->chunk_count(); }
  int64_t chunk_pairs() const { return current_->chunk_pairs(); }
  bool cached() const { return current_->cached(); }
  void RunChunk(int64_t chunk, Scratch* scratch) { current_->RunChunk(chunk, scratch); }
  void EndPhase();

  // REQUIRES: finished. [count, size, dim]; empty: not wanted.
  const Buffer<double>& product(int side) const { return product_[side]; }
  const HessianConvergence& convergence() const { return convergence_; }

 private:
  void LoadDirections(int side);
  void Start();
  void Absorb();
  void LeaveSphere(int side);

  const Cloud& cloud(int side) const { return side == 0 ? inputs_.x : inputs_.y; }

  const MemberInputs& inputs_;
  const TransportInputs& in_;
  const std::vector<SolvedProblem<TE, T>> problems_;
  const Buffer<double>* gradient_;
  const int64_t cache_bytes_, dim_;
  size_t which_ = 0;
  Buffer<double> given_[2], direction_[2];  // [count, size, dim]; empty: 0. On the sphere: others than given.
  std::unique_ptr<TransportHessian<TE, T>> current_;
  Buffer<double> product_[2];
  HessianConvergence convergence_;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_DIRECTIONS_H_
