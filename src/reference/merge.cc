#include "reference/attention.h"

namespace tessera::reference {
namespace {

struct Merge {
  const tessera_merge& m;

  View part_out(int64_t n) const { return {m.part_out, m.part_out_data[n]}; }
  View part_lse(int64_t n) const { return {m.part_lse, m.part_lse_data[n]}; }

  // log sum_n exp(lse_n)
  double lse(int64_t b, int64_t s, int64_t h) const {
    double largest = -infinity, sum = 0;
    for (int64_t n = 0; n < m.parts; ++n) {
      const double part = part_lse(n).at(b, s, h, 0);
      if (std::isnan(part)) return part;
      largest = std::max(largest, part);
    }
    if (std::isinf(largest)) return largest;
    for (int64_t n = 0; n < m.parts; ++n) sum += weight(part_lse(n).at(b, s, h, 0), largest);
    return largest + std::log(sum);
  }

  // sum_n w_n out_n; a part without weight for want of keys is not there, whatever its out holds.
  double out(double lse, int64_t b, int64_t s, int64_t h, int64_t d) const {
    double sum = 0;
    for (int64_t n = 0; n < m.parts; ++n) {
      const double part = part_lse(n).at(b, s, h, 0);
      if (part != -infinity) sum += weight(part, lse) * part_out(n).at(b, s, h, d);
    }
    return sum;
  }

  void forward(int64_t b, int64_t s, int64_t h) const {
    const double whole = lse(b, s, h);
    if (m.lse.dtype != TESSERA_ABSENT) Target{m.lse, m.lse_data}.put(b, s, h, 0, whole);
    for (int64_t d = 0; d < m.dim; ++d) Target{m.out, m.out_data}.put(b, s, h, d, out(whole, b, s, h, d));
  }

  void backward(int64_t b, int64_t s, int64_t h) const {
    const View dout = {m.dout, m.dout_data}, dlse = {m.dlse, m.dlse_data};
    const double whole = lse(b, s, h);
    for (int64_t n = 0; n < m.parts; ++n) {
      const double part = part_lse(n).at(b, s, h, 0), w = weight(part, whole);
      const Target dpart_out = {m.part_out, m.dpart_out_data[n]}, dpart_lse = {m.part_lse, m.dpart_lse_data[n]};
      double sum = dlse.present() ? dlse.at(b, s, h, 0) : 0;
      for (int64_t d = 0; d < m.dim; ++d) {
        const double gradient = dout.at(b, s, h, d);
        sum += gradient * (part_out(n).at(b, s, h, d) - out(whole, b, s, h, d));
        dpart_out.put(b, s, h, d, part == -infinity ? 0 : w * gradient);
      }
      dpart_lse.put(b, s, h, 0, part == -infinity ? 0 : w * sum);
    }
  }
};

}  // namespace

void merge(const tessera_merge& m) {
  const Merge body = {m};
  for (int64_t b = 0; b < m.batch; ++b)
    for (int64_t s = 0; s < m.len; ++s)
      for (int64_t h = 0; h < m.heads; ++h) m.pass == TESSERA_FORWARD ? body.forward(b, s, h) : body.backward(b, s, h);
}

}  // namespace tessera::reference
