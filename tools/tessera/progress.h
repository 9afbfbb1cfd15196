// A bar on a terminal for whatever takes longer than two seconds; nothing anywhere else.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

namespace tessera::tools {

class Progress {
 public:
  // `total` steps; 0 if what is done cannot be told, then the bar walks and counts seconds.
  explicit Progress(std::string what, int64_t total = 0, bool wanted = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step();
  void label(std::string what);                                 // what is done from now on; the seconds go on
  void print(const std::string& text, std::FILE* to = stdout);  // the bar out of its way

 private:
  void draw();  // once a tick, on the bar's own thread
  void clear();

  std::string what_;
  const int64_t total_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable ended_;
  int64_t done_ = 0;
  bool drawn_ = false;
  bool end_ = false;
  std::thread thread_;
};

}  // namespace tessera::tools
