// What the server does with the bytes of a request, without the transport: decode, validate, solve on the CPU, encode.
#ifndef SINKHORN_TESTS_FUZZ_SOLVE_H_
#define SINKHORN_TESTS_FUZZ_SOLVE_H_

#include "absl/strings/string_view.h"

namespace sinkhorn {

// Takes `bytes` for a SolveRequest, or for a SolveStreamRequest. Aborts if an error does not say what is wrong, if an
// output was not written, or if the reply cannot be read.
void SolveBytes(absl::string_view bytes, bool in_stream);

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_FUZZ_SOLVE_H_
