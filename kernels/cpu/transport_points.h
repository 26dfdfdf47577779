// What is done to points and costs before they become densities, by the best instruction set here.
#ifndef SINKHORN_KERNELS_CPU_TRANSPORT_POINTS_H_
#define SINKHORN_KERNELS_CPU_TRANSPORT_POINTS_H_

#include <cstdint>

namespace sinkhorn::cpu {

// out = rows [count, dim] less their mean, the centre [dim]; norm2[i] = |row i of out|^2. `in` may be `out`.
void Centre(const float* in, int64_t count, int64_t dim, double* out, double* centre, double* norm2);
void Centre(const double* in, int64_t count, int64_t dim, double* out, double* centre, double* norm2);

// out[i] = <row i, vector>.
void RowDots(const double* rows, int64_t count, int64_t dim, const double* vector, double* out);

// out[k] = row[k] * factor.
void ScaleRow(const double* row, int64_t dim, double factor, float* out);
void ScaleRow(const double* row, int64_t dim, double factor, double* out);

// Rows to packed panels, see transport_kernels.h. What pads the last one is left alone.
void Pack(const double* rows, int64_t count, int64_t dim, int64_t panel, float* out);
void Pack(const double* rows, int64_t count, int64_t dim, int64_t panel, double* out);

// out += sum over `columns` points y_j of weights[j] (point - y_j) / |point - y_j|, 0 for those that coincide with it.
// `packed`: panels of `panel` points, a multiple of 8 (see Pack); columns is a multiple of it.
void AddDirections(const double* point, int64_t dim, const double* packed, int64_t columns, int64_t panel,
                   const double* weights, double* out);

// Smallest and largest value; infinity and -infinity if there is none.
void Range(const float* values, int64_t count, float* low, float* high);
void Range(const double* values, int64_t count, double* low, double* high);

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_TRANSPORT_POINTS_H_
