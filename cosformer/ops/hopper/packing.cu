// Where the tokens of packed sequences stand: for each token its sequence, its position, its angle per position and ψ.
//
// Options, set on the compiler's command line:
// - WIDE: `given`, the bounds of the sequences, is int64, and not int32.
// - OWN: θ of a sequence is π/2 over its length; without it, θ is given, one for all heads or one for each.
// - R: number of basis functions: 1, or 2, which are the cosine and the sine.

template <bool IS_WIDE> struct Bound {
  typedef int type;
};
template <> struct Bound<true> {
  typedef long long type;
};

// position and angle (OWN) [T], sequence [T], bounds [sequences + 1], basis [heads, T, R]
extern "C" __global__ void __launch_bounds__(256)
place_packed(const Bound<WIDE>::type* __restrict__ given, const double* __restrict__ theta, double* __restrict__ position,
             double* __restrict__ angle, long long* __restrict__ sequence, int* __restrict__ bounds,
             float* __restrict__ basis, int length, int sequences, int heads) {
  const int t = blockIdx.x * 256 + threadIdx.x;
  for (int s = t; s <= sequences; s += gridDim.x * 256) bounds[s] = (int)given[s];
  if (t >= length) return;
  int s = 0;  // how many sequences end at t or before it; the last one ends at `length`
  for (int left = sequences - 1; left > 0;) {
    const int half = left / 2;
    if ((long long)given[s + half + 1] <= t) s += half + 1, left -= half + 1;
    else left = half;
  }
  const long long begin = given[s];
  const double here = (double)(t - begin);
  position[t] = here, sequence[t] = s;
  double own = 0.;
  if (OWN) own = 1.5707963267948966 / (double)((long long)given[s + 1] - begin), angle[t] = own;
  for (int h = 0; h < heads; ++h) {
    float* to = basis + ((long long)h * length + t) * R;
    if (R == 1) to[0] = 1.f;
    else {
      double sine, cosine;
      sincos((OWN ? own : theta[h]) * here, &sine, &cosine);
      *(float2*)to = make_float2((float)cosine, (float)sine);
    }
  }
}
