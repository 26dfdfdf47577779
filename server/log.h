// The server's log: one JSON object per event and line, on stderr.
//
//   {"time":"2026-01-31T12:00:00.123Z","severity":"INFO","event":"listening","port":"8001"}
#ifndef SINKHORN_SERVER_LOG_H_
#define SINKHORN_SERVER_LOG_H_

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace sinkhorn {

enum class Severity { kInfo, kWarning, kError };

using LogField = std::pair<absl::string_view, std::string>;

// Writes one line with one system call, so lines of several threads do not mix.
void Log(Severity severity, absl::string_view event, std::initializer_list<LogField> fields);

// The line that Log writes at `time`, without the newline; `time` is the text in it.
std::string LogLine(absl::string_view time, Severity severity, absl::string_view event,
                    std::initializer_list<LogField> fields);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_LOG_H_
