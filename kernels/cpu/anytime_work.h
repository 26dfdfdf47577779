// Work that can be asked to end before its tolerance or its iterations: Solve::FinishSoon (kernels/backend.h).
#ifndef SINKHORN_KERNELS_CPU_ANYTIME_WORK_H_
#define SINKHORN_KERNELS_CPU_ANYTIME_WORK_H_

#include "kernels/cpu/work.h"

namespace sinkhorn::cpu {

class AnytimeWork : public Work {
 public:
  // The iterations in progress are the last. Between slices.
  virtual void FinishSoon() = 0;
};

}  // namespace sinkhorn::cpu

#endif  // SINKHORN_KERNELS_CPU_ANYTIME_WORK_H_
