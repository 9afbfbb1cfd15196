#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace tessera::tools {
namespace {

constexpr int width = 30;
constexpr auto patience = std::chrono::seconds(2);
constexpr auto tick = std::chrono::milliseconds(200);

}  // namespace

Progress::Progress(std::string what, int64_t total, bool wanted) : what_(std::move(what)), total_(total) {
  if (!wanted || !::isatty(STDERR_FILENO)) return;
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    auto pause = std::chrono::milliseconds(patience);
    while (!ended_.wait_for(lock, pause, [this] { return end_; })) {
      draw();
      pause = tick;
    }
    clear();
  });
}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  ended_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Progress::step() {
  const std::lock_guard lock(mutex_);
  ++done_;
}

void Progress::label(std::string what) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
}

void Progress::print(const std::string& text, std::FILE* to) {
  const std::lock_guard lock(mutex_);
  clear();
  fmt::print(to, "{}", text);
  std::fflush(to);
}

void Progress::draw() {
  const auto elapsed = std::chrono::steady_clock::now() - begin_;
  std::string bar(width, ' ');
  if (total_ > 0) {
    bar.replace(0, static_cast<size_t>(width * done_ / total_), static_cast<size_t>(width * done_ / total_), '#');
  } else {
    const auto at = static_cast<size_t>(elapsed / tick % (width - 2));
    bar.replace(at, 3, "###");
  }
  const std::string count = total_ > 0 ? fmt::format("{}/{}  ", done_, total_) : "";
  fmt::print(stderr, "\r{} [{}] {}{} s \033[K", what_, bar, count, elapsed / std::chrono::seconds(1));
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::clear() {
  if (std::exchange(drawn_, false)) fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

}  // namespace tessera::tools
