// The larger entries of a member's plan, collected row by row as a pass makes it, in compressed sparse rows.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_SPARSE_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_SPARSE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cpu/half.h"
#include "kernels/problem.h"

namespace sinkhorn::cpu {

// Memory: of the entries found, until they are too many, and of a row for each thread.
template <typename T>
class SparseRows {
 public:
  // `out` and the memory it names outlive it.
  SparseRows(const SparseOutput& out, int64_t member, int64_t rows, int64_t chunk_count)
      : out_(out), member_(member), counts_(rows), chunks_(chunk_count) {}

  // Row i of the plan. Rows of a chunk come in order, one at a time; chunks on any threads.
  void AddRow(int64_t chunk, int64_t i, const T* row, int64_t columns) {
    Chunk& c = chunks_[chunk];
    const bool keep = total_.load(std::memory_order_relaxed) <= out_.max_entries;
    int64_t found = 0;
    for (int64_t j = 0; j < columns; ++j) {
      if (!(row[j] >= out_.threshold && row[j] > 0)) continue;
      ++found;
      c.mass += row[j];
      if (!keep) continue;
      c.columns.push_back(static_cast<int32_t>(j));
      c.values.push_back(row[j]);
    }
    counts_[i] = found;
    total_.fetch_add(found, std::memory_order_relaxed);
  }

  // All rows are there.
  void Store() const {
    const int64_t rows = counts_.size();
    int64_t* offsets = out_.row_offsets + member_ * (rows + 1);
    offsets[0] = 0;
    std::partial_sum(counts_.begin(), counts_.end(), offsets + 1);
    double mass = 0;
    for (const Chunk& c : chunks_) mass += c.mass;
    out_.mass[member_] = mass;
    if (offsets[rows] > out_.max_entries) return;
    int64_t at = member_ * out_.max_entries;
    for (const Chunk& c : chunks_) {
      std::copy(c.columns.begin(), c.columns.end(), out_.columns + at);
      StoreRow(out_.values.dtype, c.values.data(), c.values.size(), out_.values.data, at);
      at += c.columns.size();
    }
  }

 private:
  struct Chunk {
    std::vector<int32_t> columns;
    std::vector<T> values;
    double mass = 0;
  };
  const SparseOutput& out_;
  const int64_t member_;
  std::vector<int64_t> counts_;  // Entries of each row.
  std::vector<Chunk> chunks_;
  std::atomic<int64_t> total_{0};
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_SPARSE_H_
