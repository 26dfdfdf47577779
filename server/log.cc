#include "server/log.h"

#include <unistd.h>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace sinkhorn {
namespace {

constexpr int64_t kThrottleNanoseconds = 1000000000;

// Appends `text` as a JSON string. Bytes of 0x80 and above are taken to be UTF-8, which protobuf has checked.
void AppendQuoted(absl::string_view text, std::string* out) {
  out->push_back('"');
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

const char* Name(Severity severity) {
  switch (severity) {
    case Severity::kInfo:
      return "INFO";
    case Severity::kWarning:
      return "WARNING";
    case Severity::kError:
      return "ERROR";
  }
  return "";
}

}  // namespace

int64_t LogThrottle::Pass() {
  count_.fetch_add(1);
  const int64_t now = absl::GetCurrentTimeNanos();
  int64_t last = last_ns_.load();
  if (now - last < kThrottleNanoseconds || !last_ns_.compare_exchange_strong(last, now)) return 0;
  return count_.exchange(0);
}

std::string LogLine(absl::string_view time, Severity severity, absl::string_view event,
                    std::initializer_list<LogField> fields) {
  std::string line = "{\"time\":";
  AppendQuoted(time, &line);
  line += ",\"severity\":";
  AppendQuoted(Name(severity), &line);
  line += ",\"event\":";
  AppendQuoted(event, &line);
  for (const LogField& field : fields) {
    line.push_back(',');
    AppendQuoted(field.first, &line);
    line.push_back(':');
    AppendQuoted(field.second, &line);
  }
  line.push_back('}');
  return line;
}

void Log(Severity severity, absl::string_view event, std::initializer_list<LogField> fields) {
  const std::string time = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  const std::string line = LogLine(time, severity, event, fields) + "\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;  // Nobody is left to tell.
}

}  // namespace sinkhorn
