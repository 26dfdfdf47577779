// The caller's place in a distributed trace: https://www.w3.org/TR/trace-context, section 3.2.
#ifndef SINKHORN_SERVER_TRACE_H_
#define SINKHORN_SERVER_TRACE_H_

#include "absl/strings/string_view.h"

namespace sinkhorn {

constexpr char kTraceParent[] = "traceparent";  // The metadata that carries it.

// The trace id (32 hexadecimal digits, a part of `traceparent`) of "00-TRACE-PARENT-FLAGS". Empty if it is not of that
// form: later versions may be longer, ids of zeros alone say that there is none.
absl::string_view TraceIdOf(absl::string_view traceparent);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_TRACE_H_
