// A transport member in the arithmetic of its data: the stages it goes through, and what they leave to the next.
//
// Engines iterate (its own problem; debiased also OT(a, a) and OT(b, b)); passes over the plan make what needs one
// (transport_member_passes.cc); then come the primal bound and Hessian-vector products, where they are wanted.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_TYPED_MEMBER_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_TYPED_MEMBER_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu/transport_bound.h"
#include "kernels/cpu/transport_directions.h"
#include "kernels/cpu/transport_engine.h"
#include "kernels/cpu/transport_member.h"
#include "kernels/cpu/transport_sparse.h"

namespace sinkhorn::cpu {

template <typename TE, typename T>
class TypedMember final : public TransportMember {
 public:
  TypedMember(const Problem& problem, int64_t index, int64_t cache_bytes, std::unique_ptr<MemberInputs> inputs)
      : problem_(problem), index_(index), cache_bytes_(cache_bytes), inputs_(std::move(inputs)) {
    StartEngine();
  }

  int64_t chunk_count() const override {
    switch (stage_) {
      case Stage::kIterate:
        return engine().chunk_count();
      case Stage::kApply:
        return apply_chunks_;
      case Stage::kBound:
        return bound_->chunk_count();
      case Stage::kHessian:
        return hessian_->chunk_count();
      case Stage::kDone:
        return 0;
    }
    return 0;
  }
  double chunk_seconds() const override {
    const double make = DensitySeconds(problem_.dim);
    const double width = sizeof(T) / sizeof(float);
    switch (stage_) {
      case Stage::kIterate:
        return engine().chunk_pairs() * width * (engine().cached() ? kReadSeconds : make);
      case Stage::kApply:
        return kChunkPairs * width * kReadSeconds;
      case Stage::kHessian:
        return hessian_->chunk_pairs() * width * (make + problem_.transport.hessian.count * kReadSeconds);
      default:
        return kChunkPairs / 16 * 2 * make;
    }
  }
  void RunChunk(int64_t chunk, Scratch* scratch) override {
    if (stage_ == Stage::kIterate) return engines_.back()->RunChunk(chunk, scratch);
    if (stage_ == Stage::kBound) return bound_->RunChunk(chunk, scratch);
    if (stage_ == Stage::kHessian) return hessian_->RunChunk(chunk, scratch);
    const int64_t rows = costs_[pass().engine]->size(pass().side);
    const int64_t end = std::min(rows, (chunk + 1) * apply_blocks_ * kRowBlock);
    for (int64_t row = chunk * apply_blocks_ * kRowBlock; row < end; row += kRowBlock) {
      ApplyBlock(row, chunk, scratch);
    }
  }
  void EndPhase() override;
  void FinishSoon() override {
    finish_soon_ = true;
    if (stage_ == Stage::kIterate) engines_.back()->FinishSoon();
  }
  absl::Status status() const override { return status_; }
  Convergence progress() const override { return stage_ == Stage::kIterate ? engine().convergence() : convergence_; }

 private:
  static constexpr int64_t kChunkPairs = int64_t{1} << 20;
  static constexpr double kReadSeconds = 0.12e-9;  // Of a density, on one thread.
  enum class Stage { kIterate, kApply, kBound, kHessian, kDone };
  using Engine = TransportEngine<TE, T>;
  // Flushing takes digits off the entries of rows that weigh less.
  static constexpr double kLightRow = sizeof(T) == sizeof(float) ? 1e-25 : 1e-290;
  struct Pass {
    int engine, side;
  };

  const Engine& engine() const { return *engines_.back(); }
  // Whether outputs want entries of the plan that this precision may not hold.
  bool ExceedsFloat() const;
  const Pass& pass() const { return passes_[pass_]; }
  const Outputs& out() const { return problem_.outputs; }
  bool point_cloud() const { return problem_.kind == ProblemKind::kPointCloud; }
  int64_t size(int side) const { return side == 0 ? problem_.n : problem_.m; }
  const Cloud& cloud(int side) const { return side == 0 ? inputs_->x : inputs_->y; }
  // The same points as they were given: what is projected.
  const Cloud& given(int side) const {
    const Cloud& as_given = side == 0 ? inputs_->given_x : inputs_->given_y;
    return as_given.count > 0 ? as_given : cloud(side);
  }
  bool euclidean() const { return problem_.transport.point_cost == PointCost::kEuclidean; }
  bool gradient_wanted() const { return gradient_[Measure(pass().engine, pass().side)].size() > 0; }
  const OutputView& projection() const {
    static const OutputView none;
    return pass().engine > 0 ? none : pass().side == 0 ? out().projection_x : out().projection_y;
  }
  // Which of x (0) and y (1) stands on a side of an engine's problem.
  static int Measure(int engine, int side) { return engine == 0 ? side : engine - 1; }

  void StartEngine();
  void PlanPasses();
  void StartPass();
  void LoadRightSides();
  void ApplyBlock(int64_t row, int64_t chunk, Scratch* scratch);
  void StoreProjections(const int64_t* rows, double* sums, T* plan, double* product, TE* e, TE* workspace) const;
  void Project(int64_t i, double mass, const double* product) const;
  void AddGradient(int64_t i, double mass, const double* product);
  void AddDirections(int64_t i, const T* plan_row);
  void TurnGradients();
  void StartBound();
  void StartHessian();
  void Finish();

  const Problem& problem_;  // The work's: outlives this.
  const int64_t index_;
  const int64_t cache_bytes_;
  std::unique_ptr<MemberInputs> inputs_;
  std::vector<std::unique_ptr<CostSource<TE, T>>> costs_;
  std::vector<std::unique_ptr<Engine>> engines_;
  Stage stage_ = Stage::kIterate;
  bool finish_soon_ = false;
  Convergence convergence_;
  absl::Status status_;

  // Passes over the plan.
  std::vector<Pass> passes_;
  size_t pass_ = 0;
  int64_t apply_chunks_ = 0, apply_blocks_ = 1, points_width_ = 0, columns_width_ = 0;
  Buffer<T> points_, columns_;  // [padded other side, width]: centred points; V or U
  Buffer<T> given_points_;      // Those to be projected, where they are others.
  Buffer<double> packed_;       // kEuclidean: points in panels of kPanel.
  Buffer<double> gradient_[2];  // [n, dim], [m, dim]
  Buffer<TE> zeros_;
  std::vector<double> linear_;  // per chunk: sum P z
  double linear_sum_ = 0;
  std::unique_ptr<SparseRows<T>> sparse_;  // During the first pass.
  std::unique_ptr<CostSource<double, double>> bound_cost_;
  std::unique_ptr<PrimalBound> bound_;
  std::unique_ptr<HessianStage<TE, T>> hessian_;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_TYPED_MEMBER_H_
