#include "kernels/cpu/transport_hessian.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/transport_blocks.h"
#include "kernels/cpu/transport_points.h"

namespace sinkhorn::cpu {
namespace {

constexpr int64_t kSlotPairs = 65536, kSlotsMax = 64, kAccumulatorsMax = int64_t{1} << 24;
constexpr int64_t kChunkPairs = int64_t{1} << 20;

template <typename TE, typename T>
void MultiplyEntries(const T* p, const TE* e, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(p[i] * e[i]);
}

}  // namespace

// Scratch of a block.
template <typename TE, typename T>
struct TransportHessian<TE, T>::Memory {
  Memory(const TransportHessian& h, Scratch* scratch) {
    const int64_t block = h.cost_.block_size(h.side()), work = h.cost_.WorkspaceSize(h.side());
    const int64_t rows = kRowBlock * 2 * RoundUp(h.dim_, 16), products = kRowBlock * h.width_;
    product = static_cast<double*>(
        scratch->Get(products * sizeof(double) + (block + work + rows) * sizeof(TE) + 2 * block * sizeof(T)));
    e = reinterpret_cast<TE*>(product + products);
    workspace = e + block;
    bend_rows = workspace + work;
    bent = reinterpret_cast<T*>(bend_rows + rows);
    own_plan = bent + block;
  }
  double* product;
  TE *e, *workspace, *bend_rows;
  T *bent, *own_plan;
  const T* plan = nullptr;
};

template <typename TE, typename T>
TransportHessian<TE, T>::TransportHessian(const HessianProblem<TE, T>& problem)
    : problem_(problem),
      cost_(*problem.cost),
      options_(problem.inputs->hessian),
      dim_(cost_.dim()),
      count_(options_.count),
      width_(RoundUp(dim_, 16)),
      dot_(problem.inputs->point_cost == PointCost::kNegativeDot),
      factor_(2 * CostFactor(*problem.inputs)),
      epsilon_(problem.answer->epsilon),
      balanced_(std::isinf(problem.answer->side[0].rho) && std::isinf(problem.answer->side[1].rho)),
      directions_(options_.count) {
  for (int side = 0; side < 2; ++side) {
    const TransportAnswer::Side& s = problem_.answer->side[side];
    extra_[side].Resize(cost_.padded(side));
    diagonal_[side].Resize(cost_.padded(side));
    for (int64_t i = 0; i < s.size; ++i) {
      if (std::isfinite(s.rho)) extra_[side][i] = epsilon_ / s.rho * s.mass[i] * std::exp(-s.potential[i] / s.rho);
      diagonal_[side][i] = s.marginal[i] + extra_[side][i];
    }
    if (problem_.wanted[side]) product_[side].Resize(count_ * cost_.size(side) * dim_);
  }
  const int64_t columns = cost_.padded(1), rows = RoundUp(cost_.size(0), kRowBlock);
  ones_.Resize(std::max(columns, cost_.padded(0)));
  std::fill(ones_.begin(), ones_.end(), T(1));
  sources_.Resize(count_ * columns);
  jacobi_.Resize(columns);
  for (int64_t q = 0; q < count_; ++q) SetShifts(q);
  if (rows * columns * static_cast<int64_t>(sizeof(T)) <= problem_.cache_bytes) plan_.Allocate(rows * columns);
  StartOutput(Phase::kSetup);
}

// u_i = <dx_i, grad of C's terms of the row>, v_j likewise; and room for the rest.
template <typename TE, typename T>
void TransportHessian<TE, T>::SetShifts(int64_t index) {
  Direction& direction = directions_[index];
  for (int side = 0; side < 2; ++side) {
    for (auto* buffer : {&direction.shift[side], &direction.right[side], &direction.potential[side]}) {
      buffer->Resize(cost_.padded(side));
    }
    const double* steps = given(side, index);
    const Cloud &own = *problem_.cloud[side], &other = *problem_.cloud[1 - side];
    for (int64_t i = 0; i < cost_.size(side) && steps != nullptr; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < dim_; ++k) {
        const double apart = dot_ ? -other.centre[k] : own.points[i * dim_ + k] + own.centre[k] - other.centre[k];
        sum += steps[i * dim_ + k] * apart;
      }
      direction.shift[side][i] = factor_ * sum;
    }
  }
  for (auto* buffer : {&direction.residual, &direction.step, &direction.conditioned}) buffer->Resize(cost_.padded(1));
}

// ---- Phases and their chunks ----------------------------------------------------------------------------------------

template <typename TE, typename T>
void TransportHessian<TE, T>::Start(Phase phase) {
  phase_ = phase;
  const int64_t columns = cost_.padded(1 - side()), pairs = cost_.size(0) * cost_.size(1);
  const int64_t blocks = RoundUp(cost_.size(side()), kRowBlock) / kRowBlock, lanes = count_ + 1;
  slots_ = std::min({(pairs + kSlotPairs - 1) / kSlotPairs, kSlotsMax, blocks,
                     std::max<int64_t>(1, kAccumulatorsMax / (lanes * columns))});
  const bool bends = phase == Phase::kSetup || phase == Phase::kRows || phase == Phase::kColumns;
  const int64_t weight = 1 + (plan_valid_ ? 0 : dim_ / 16) + count_ * (bends ? 4 + dim_ / 8 : 1);
  const int64_t slot_blocks = (blocks + slots_ - 1) / slots_;
  chunk_blocks_ = std::min(slot_blocks, std::max<int64_t>(1, kChunkPairs / weight / (kRowBlock * columns)));
  steps_ = (slot_blocks + chunk_blocks_ - 1) / chunk_blocks_;
  step_ = 0;
  if (side() == 0 && acc_.size() < slots_ * lanes * columns) acc_.Allocate(slots_ * lanes * columns);
}

// A sweep that multiplies each direction's `source` with the plan and, weighted, with its transpose.
template <typename TE, typename T>
void TransportHessian<TE, T>::StartSchur(Phase phase, Buffer<double> Direction::*source) {
  const int64_t columns = cost_.padded(1);
  for (int64_t q = 0; q < count_; ++q) {
    const Buffer<double>& values = source == nullptr ? directions_[q].potential[1] : directions_[q].*source;
    for (int64_t j = 0; j < columns; ++j) sources_[q * columns + j] = static_cast<T>(values[j]);
  }
  Start(phase);
}

// Setup and the two sides of the product: what makes D, and the right-hand sides of products.
template <typename TE, typename T>
void TransportHessian<TE, T>::StartOutput(Phase phase) {
  phase_ = phase;
  const int other = 1 - side();
  const Cloud& points = *problem_.cloud[other];
  const int64_t padded = cost_.padded(other);
  const bool pairs_points = problem_.direction[side()] != nullptr, pairs_steps = problem_.direction[other] != nullptr;
  const int64_t bend_dim = dim_ * (pairs_points + pairs_steps);
  bend_.resize(count_);
  terms_.resize(count_);
  point_steps_.resize(count_);
  points_.Resize(padded * width_);
  for (int64_t j = 0; j < points.count; ++j) {
    for (int64_t k = 0; k < dim_; ++k) points_[j * width_ + k] = static_cast<T>(points.points[j * dim_ + k]);
  }
  for (int64_t q = 0; q < count_; ++q) {
    Buffer<double> rows(points.count * bend_dim);
    point_steps_[q].Resize(padded * width_);
    terms_[q].Resize(padded);
    for (int64_t j = 0; j < points.count; ++j) {
      double* row = rows.data() + j * bend_dim;
      if (pairs_points) row = std::copy_n(points.points.data() + j * dim_, dim_, row);
      if (phase != Phase::kSetup) terms_[q][j] = static_cast<TE>(-directions_[q].potential[other][j]);
      if (!pairs_steps) continue;
      const double* steps = given(other, q) + j * dim_;
      std::copy_n(steps, dim_, row);
      for (int64_t k = 0; k < dim_; ++k) point_steps_[q][j * width_ + k] = static_cast<T>(steps[k]);
    }
    bend_[q].Resize(padded * bend_dim);
    Pack(rows.data(), points.count, bend_dim, kernels_.panel, bend_[q].data());
  }
  Start(phase);
}

template <typename TE, typename T>
void TransportHessian<TE, T>::RunChunk(int64_t chunk, Scratch* scratch) {
  const int64_t blocks = RoundUp(cost_.size(side()), kRowBlock) / kRowBlock, lanes = (count_ + 1) * cost_.padded(1);
  T* acc = acc_.data() + chunk * lanes;
  if (step_ == 0 && side() == 0) std::fill(acc, acc + lanes, T(0));
  const int64_t begin = chunk * blocks / slots_ + step_ * chunk_blocks_;
  const int64_t end = std::min((chunk + 1) * blocks / slots_, begin + chunk_blocks_);
  for (int64_t block = begin; block < end; ++block) RunBlock(block * kRowBlock, acc, scratch);
}

template <typename TE, typename T>
void TransportHessian<TE, T>::RunBlock(int64_t row, T* acc, Scratch* scratch) {
  Memory memory(*this, scratch);
  int64_t rows[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) rows[r] = row + r < cost_.size(side()) ? row + r : -1;
  const bool kept = side() == 0 && plan_.size() > 0;
  T* plan = kept ? plan_.data() + row * cost_.padded(1) : memory.own_plan;
  double sums[kRowBlock];
  if (!kept || !plan_valid_) PlanRows(*problem_.state, side(), rows, plan, sums, memory.workspace);
  memory.plan = plan;
  switch (phase_) {
    case Phase::kSetup:
      return SetupBlock(rows, acc, &memory);
    case Phase::kReduce:
    case Phase::kMultiply:
    case Phase::kNeumann:
    case Phase::kCheck:
      return SchurBlock(rows, acc, memory);
    case Phase::kRows:
    case Phase::kColumns:
      return OutputBlock(rows, &memory);
    case Phase::kDone:
      return;
  }
}

// bent = P_ij (D_ij - df_i - dg_j), potentials less u and v; in setup without them.
template <typename TE, typename T>
void TransportHessian<TE, T>::MakeBent(const int64_t* rows, int64_t index, Memory* memory) const {
  const int64_t columns = cost_.padded(1 - side());
  const double* steps = given(side(), index);
  const bool pairs_steps = problem_.direction[1 - side()] != nullptr;
  const int64_t bend_dim = dim_ * ((steps != nullptr) + pairs_steps);
  TE row_term[kRowBlock] = {};
  for (int r = 0; r < kRowBlock; ++r) {
    TE* row = memory->bend_rows + r * bend_dim;
    std::fill(row, row + bend_dim, TE(0));
    if (rows[r] < 0) continue;
    if (steps != nullptr) {
      ScaleRow(steps + rows[r] * dim_, dim_, -factor_, row);
      row += dim_;
    }
    if (pairs_steps) ScaleRow(problem_.cloud[side()]->points.data() + rows[r] * dim_, dim_, -factor_, row);
    if (phase_ != Phase::kSetup) {
      row_term[r] = static_cast<TE>(-directions_[index].potential[side()][rows[r]]);
    }
  }
  kernels_.exponents(memory->bend_rows, bend_dim, bend_[index].data(), columns, TE(0), row_term, terms_[index].data(),
                     memory->e);
  MultiplyEntries(memory->plan, memory->e, kRowBlock * columns, memory->bent);
}

template <typename TE, typename T>
void TransportHessian<TE, T>::SetupBlock(const int64_t* rows, T* acc, Memory* memory) {
  const int64_t columns = cost_.padded(1);
  double sums[kRowBlock];
  for (int64_t q = 0; q < count_; ++q) {
    MakeBent(rows, q, memory);
    kernels_.row_sums(memory->bent, columns, ones_.data(), sums);
    kernels_.add_columns(memory->bent, columns, ones_.data(), acc + q * columns);
    for (int r = 0; r < kRowBlock; ++r) {
      if (rows[r] >= 0) directions_[q].right[0][rows[r]] = sums[r];
    }
  }
  T weight[kRowBlock];
  for (int r = 0; r < kRowBlock; ++r) {
    const double diagonal = rows[r] < 0 ? 0 : diagonal_[0][rows[r]];
    weight[r] = diagonal > 0 ? static_cast<T>(1 / diagonal) : T(0);
  }
  // P / (r + p) first: squares of plan entries may be too small for T.
  for (int64_t at = 0; at < kRowBlock * columns; ++at) {
    memory->bent[at] = memory->plan[at] * weight[at / kTile % kRowBlock] * memory->plan[at];
  }
  kernels_.add_columns(memory->bent, columns, ones_.data(), acc + count_ * columns);
}

template <typename TE, typename T>
void TransportHessian<TE, T>::SchurBlock(const int64_t* rows, T* acc, const Memory& memory) {
  const int64_t columns = cost_.padded(1);
  for (int64_t q = 0; q < count_; ++q) {
    Direction& direction = directions_[q];
    if (phase_ != Phase::kReduce && phase_ != Phase::kCheck && !direction.active) continue;
    double sums[kRowBlock];
    if (phase_ != Phase::kReduce) kernels_.row_sums(memory.plan, columns, sources_.data() + q * columns, sums);
    T weight[kRowBlock];
    for (int r = 0; r < kRowBlock; ++r) {
      const double diagonal = rows[r] < 0 ? 0 : diagonal_[0][rows[r]];
      const double inverse = diagonal > 0 ? 1 / diagonal : 0;
      const double value = rows[r] < 0 ? 0 : phase_ == Phase::kReduce ? direction.right[0][rows[r]] : sums[r];
      weight[r] = static_cast<T>(value * inverse);
      if (phase_ == Phase::kCheck && rows[r] >= 0) {
        direction.potential[0][rows[r]] = (direction.right[0][rows[r]] - sums[r]) * inverse;
      }
    }
    kernels_.add_columns(memory.plan, columns, weight, acc + q * columns);
  }
}

// factor (rho_i A_i - sum_j dP_ij y_j + r_i dx_i - sum_j P_ij dy_j) with A_i = x_i - centre of y, of negative dots less
// the centre of y and without r_i dx_i; rho_i = sum_j dP_ij = -p_i df_i / eps.
template <typename TE, typename T>
void TransportHessian<TE, T>::OutputBlock(const int64_t* rows, Memory* memory) {
  const int own = side();
  const int64_t columns = cost_.padded(1 - own), size = cost_.size(own);
  const Cloud &mine = *problem_.cloud[own], &theirs = *problem_.cloud[1 - own];
  const TransportAnswer::Side& s = problem_.answer->side[own];
  for (int64_t q = 0; q < count_; ++q) {
    const Direction& direction = directions_[q];
    const double* steps = given(own, q);
    MakeBent(rows, q, memory);
    kernels_.multiply(memory->bent, columns, points_.data(), width_, memory->product);
    for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) {
      const int64_t i = rows[r];
      double* out = product_[own].data() + (q * size + i) * dim_;
      const double total = -extra_[own][i] * (direction.potential[own][i] + direction.shift[own][i]) / epsilon_;
      for (int64_t k = 0; k < dim_; ++k) {
        const double apart = dot_ ? -theirs.centre[k] : mine.points[i * dim_ + k] + mine.centre[k] - theirs.centre[k];
        // The bent block is -eps dP.
        out[k] = total * apart + memory->product[r * width_ + k] / epsilon_;
        if (steps != nullptr && !dot_) out[k] += s.marginal[i] * steps[i * dim_ + k];
      }
    }
    if (problem_.direction[1 - own] != nullptr) {
      kernels_.multiply(memory->plan, columns, point_steps_[q].data(), width_, memory->product);
    } else {
      std::fill(memory->product, memory->product + kRowBlock * width_, 0.0);
    }
    for (int r = 0; r < kRowBlock && rows[r] >= 0; ++r) {
      double* out = product_[own].data() + (q * size + rows[r]) * dim_;
      for (int64_t k = 0; k < dim_; ++k) out[k] = factor_ * (out[k] - memory->product[r * width_ + k]);
    }
  }
}

template class TransportHessian<float, float>;
template class TransportHessian<double, float>;
template class TransportHessian<double, double>;

}  // namespace sinkhorn::cpu
