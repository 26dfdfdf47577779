#include "kernels/cpu/transport_bound.h"

#include <algorithm>
#include <cmath>

namespace sinkhorn::cpu {
namespace {
constexpr int64_t kChunkPairs = int64_t{1} << 16;
}  // namespace

PrimalBound::PrimalBound(const CostSource<double, double>* cost, double epsilon, const Buffer<double>* masses[2],
                         const Buffer<double>* potentials[2])
    : cost_(*cost), epsilon_(epsilon), mass_{masses[0], masses[1]} {
  for (int side = 0; side < 2; ++side) {
    const int64_t padded = cost_.padded(side);
    for (auto* buffer : {&term_[side], &weight_[side], &sums_[side], &lack_[side]}) buffer->Resize(padded);
    for (int64_t i = 0; i < padded; ++i) {
      weight_[side][i] = (*mass_[side])[i];
      term_[side][i] =
          i < cost_.size(side) ? ((*potentials[side])[i] - cost_.shift(side)[i]) * kLog2E / epsilon_ : kVoid;
    }
  }
  zero_columns_.Resize(cost_.padded(1));
  Start();
}

void PrimalBound::Start() {
  const int64_t blocks = RoundUp(cost_.size(side()), kRowBlock) / kRowBlock;
  chunk_blocks_ = std::max<int64_t>(1, kChunkPairs / (kRowBlock * cost_.padded(1 - side())));
  chunks_ = (blocks + chunk_blocks_ - 1) / chunk_blocks_;
  partial_.assign(chunks_, Total());
}

void PrimalBound::RunChunk(int64_t chunk, Scratch* scratch) {
  const int64_t size = cost_.size(side()), block = cost_.block_size(side());
  double* density = static_cast<double*>(scratch->Get((2 * block + cost_.WorkspaceSize(side())) * sizeof(double)));
  double* e = density + block;
  double* workspace = e + block;
  const int64_t end = std::min((chunk + 1) * chunk_blocks_ * kRowBlock, size);
  for (int64_t row = chunk * chunk_blocks_ * kRowBlock; row < end; row += kRowBlock) {
    int64_t rows[kRowBlock];
    double terms[kRowBlock], sums[kRowBlock];
    for (int r = 0; r < kRowBlock; ++r) {
      rows[r] = row + r < size ? row + r : -1;
      terms[r] = rows[r] < 0 ? kVoid : term_[side()][rows[r]];
    }
    cost_.Densities(side(), rows, epsilon_, terms, term_[1 - side()].data(), weight_[1 - side()].data(), density, sums,
                    workspace);
    for (int r = 0; r < kRowBlock; ++r) {
      if (rows[r] >= 0) sums_[side()][rows[r]] = weight_[side()][rows[r]] * sums[r];
    }
    if (pass_ < kPasses - 1) continue;
    const Total total = Objective(rows, density, e, workspace);
    partial_[chunk].sum += total.sum;
    partial_[chunk].size += total.size;
  }
}

PrimalBound::Total PrimalBound::Objective(const int64_t* rows, const double* density, double* e,
                                          double* workspace) const {
  const int64_t columns = cost_.size(1);
  const double zero_rows[kRowBlock] = {};
  cost_.Exponents(0, rows, epsilon_, zero_rows, zero_columns_.data(), e, workspace);
  Total total;
  for (int r = 0; r < kRowBlock; ++r) {
    if (rows[r] < 0) continue;
    const double a = (*mass_[0])[rows[r]];
    const double lack = lack_total_ > 0 ? lack_[0][rows[r]] / lack_total_ : 0;
    for (int64_t j = 0; j < columns; ++j) {
      const double product = a * (*mass_[1])[j];
      const double q = weight_[0][rows[r]] * density[BlockIndex(r, j)] * weight_[1][j] + lack * lack_[1][j];
      const double cost = cost_.shift(0)[rows[r]] + cost_.shift(1)[j] - e[BlockIndex(r, j)] * epsilon_ / kLog2E;
      total.sum += epsilon_ * (product - q);
      total.size += epsilon_ * (product + q);
      const double ratio = q / product;
      if (!(ratio > 0)) continue;  // Nothing, or so little that it underflows.
      const double entropy = epsilon_ * std::log(ratio);
      total.sum += q * (cost + entropy);
      total.size += q * (std::abs(cost) + std::abs(entropy));
    }
  }
  return total;
}

void PrimalBound::EndPhase() {
  if (pass_ < 2) {  // Rows, then columns: shrink what is above its marginal.
    Buffer<double>& weight = weight_[side()];
    for (int64_t i = 0; i < cost_.size(side()); ++i) {
      const double sum = sums_[side()][i], mass = (*mass_[side()])[i];
      if (sum > mass) weight[i] *= mass / sum;
      if (pass_ == 1) lack_[1][i] = std::max(0.0, mass - std::min(sum, mass));
    }
  } else if (pass_ == 2) {
    for (int64_t i = 0; i < cost_.size(0); ++i) {
      lack_[0][i] = std::max(0.0, (*mass_[0])[i] - sums_[0][i]);
      lack_total_ += lack_[0][i];
    }
  } else {
    Total all;
    for (const Total& partial : partial_) {
      all.sum += partial.sum;
      all.size += partial.size;
    }
    // Terms are rounded a few times each, and added block by block.
    const double roundings = static_cast<double>(8 + kRowBlock * cost_.size(1) + cost_.size(0));
    value_ = all.sum + roundings * 0x1p-53 * all.size;
  }
  if (++pass_ < kPasses) Start();
}

}  // namespace sinkhorn::cpu
