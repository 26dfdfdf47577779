#include "server/tokens.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/log.h"

namespace sinkhorn {
namespace {

constexpr size_t kTokenCharacters = 16;  // At least.
constexpr absl::Duration kRefresh = absl::Seconds(2);
constexpr char kScheme[] = "bearer ";

// Looks at each character whatever the others are.
bool Same(absl::string_view given, const std::string& token) {
  unsigned difference = given.size() ^ token.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i] ^ token[i % token.size()]);
  return difference == 0;
}

}  // namespace

absl::StatusOr<Tokens::List> Tokens::Read(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("token file '", path, "' cannot be read"));
  List tokens;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    absl::StripAsciiWhitespace(&line);
    if (line.empty() || line[0] == '#') continue;
    if (line.size() < kTokenCharacters || !std::all_of(line.begin(), line.end(), absl::ascii_isgraph)) {
      return absl::InvalidArgumentError(absl::StrCat("token file '", path, "': line ", number, " must be a token of ",
                                                     kTokenCharacters, " printable characters or more"));
    }
    tokens.push_back(std::move(line));
  }
  if (tokens.empty()) return absl::InvalidArgumentError(absl::StrCat("token file '", path, "' has no token"));
  return tokens;
}

absl::StatusOr<std::unique_ptr<Tokens>> Tokens::Load(const std::string& path) {
  absl::StatusOr<List> list = Read(path);
  if (!list.ok()) return list.status();
  std::unique_ptr<Tokens> tokens(new Tokens(path));
  tokens->tokens_ = std::make_shared<const List>(*std::move(list));
  tokens->next_look_ns_ = absl::ToUnixNanos(absl::Now() + kRefresh);
  return tokens;
}

// By whoever comes first when it is due.
void Tokens::Refresh() {
  const absl::Time now = absl::Now();
  int64_t due = next_look_ns_.load(std::memory_order_relaxed);
  if (absl::ToUnixNanos(now) < due) return;
  if (!next_look_ns_.compare_exchange_strong(due, absl::ToUnixNanos(now + kRefresh))) return;
  absl::StatusOr<List> list = Read(path_);
  if (!list.ok()) return Log(Severity::kError, "tokens_unchanged", {{"why", std::string(list.status().message())}});
  if (*list == *std::atomic_load(&tokens_)) return;
  Log(Severity::kInfo, "tokens_changed", {{"count", absl::StrCat(list->size())}});
  std::atomic_store(&tokens_, std::make_shared<const List>(*std::move(list)));
}

absl::string_view Tokens::In(absl::string_view authorization) {
  const size_t scheme = sizeof kScheme - 1;
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return {};
  return absl::StripAsciiWhitespace(authorization.substr(scheme));
}

bool Tokens::Allow(absl::string_view authorization) {
  Refresh();
  const absl::string_view given = In(authorization);
  if (given.empty()) return false;
  const std::shared_ptr<const List> tokens = std::atomic_load(&tokens_);
  bool any = false;
  for (const std::string& token : *tokens) any |= Same(given, token);
  return any;
}

}  // namespace sinkhorn
