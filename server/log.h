// The server's log: one JSON object per event and line, on stderr.
//
//   {"time":"2026-01-31T12:00:00.123Z","severity":"INFO","event":"listening","port":"8001"}
#ifndef SINKHORN_SERVER_LOG_H_
#define SINKHORN_SERVER_LOG_H_

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace sinkhorn {

enum class Severity { kInfo, kWarning, kError };

using LogField = std::pair<absl::string_view, std::string>;

// Writes one line with one system call, so lines of several threads do not mix.
void Log(Severity severity, absl::string_view event, std::initializer_list<LogField> fields);

// For lines that a crowd could cause: one a second. Any thread.
class LogThrottle {
 public:
  // Of something that happened: how often it has since the last line that was written, this time included, if a line
  // may be written now; else 0.
  int64_t Pass();

 private:
  std::atomic<int64_t> last_ns_{0}, count_{0};
};

// The line that Log writes at `time`, without the newline; `time` is the text in it.
std::string LogLine(absl::string_view time, Severity severity, absl::string_view event,
                    std::initializer_list<LogField> fields);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_LOG_H_
