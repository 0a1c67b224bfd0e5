// Attention as a program for `minitransformer verify --command`: see ../verify_protocol.md.
// c++ -O2 -std=c++17 attention.cpp -o attention
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

std::string header;
std::vector<char> numbers;

size_t place(const std::string& name) { return header.find("\"" + name + "\":{\"dtype\""); }
bool has(const std::string& name) { return place(name) != std::string::npos; }

std::vector<size_t> list(const std::string& name, const std::string& field) {
    std::vector<size_t> found;
    size_t at = header.find('[', header.find("\"" + field + "\"", place(name))) + 1;
    while (header[at] != ']') {
        size_t used;
        found.push_back(std::stoull(header.substr(at, 24), &used));
        at += used + (header[at + used] == ',');
    }
    return found;
}

template <class T> std::vector<T> load(const std::string& name) {
    auto range = list(name, "data_offsets");
    std::vector<T> x((range[1] - range[0]) / sizeof(T));
    if (!x.empty()) std::memcpy(x.data(), numbers.data() + range[0], range[1] - range[0]);
    return x;
}

[[noreturn]] void cannot(const char* why) { std::cerr << why << "\n"; std::exit(3); }

int main(int, char** paths) {
    std::ifstream in(paths[1], std::ios::binary);
    uint64_t length;
    in.read(reinterpret_cast<char*>(&length), 8);
    header.resize(length);
    in.read(header.data(), length);
    numbers.assign(std::istreambuf_iterator<char>(in), {});

    if (header.find("\"pass\":\"\\\"backward") != std::string::npos) cannot("no backward pass");
    if (header.find("\"softcap\"") != std::string::npos) cannot("no softcap");
    if (has("multiplier")) cannot("no multiplier");
    if (header.find("\"dtype\":\"F64\"") == std::string::npos) cannot("float64 only");

    auto qs = list("q", "shape"), ks = list("k", "shape"), vs = list("v", "shape");
    size_t B = qs[0], H = qs[1], N = qs[2], D = qs[3], G = ks[1], M = ks[2], E = vs[3];
    auto q = load<double>("q"), k = load<double>("k"), v = load<double>("v"), bias = q;
    std::vector<char> keep;
    if (has("keep")) keep = load<char>("keep");
    if (has("bias")) bias = load<double>("bias");
    double scale = 1 / std::sqrt(double(D));
    size_t given = header.find("\"scale\":\"");
    if (given != std::string::npos) scale = std::stod(header.substr(given + 9, 40));

    std::vector<double> out(B * H * N * E, 0.0), score(M);
    for (size_t row = 0; row < B * H * N; ++row) {
        size_t b = row / (H * N), h = row / N % H, group = b * G + h / (H / G);
        double top = -INFINITY, total = 0;
        for (size_t j = 0; j < M; ++j) {
            score[j] = -INFINITY;
            if (!keep.empty() && !keep[row * M + j]) continue;  // not read at all
            double product = 0;
            for (size_t d = 0; d < D; ++d) product += q[row * D + d] * k[(group * M + j) * D + d];
            score[j] = scale * product + (has("bias") ? bias[row * M + j] : 0);
            top = std::max(top, score[j]);
        }
        if (top == -INFINITY) continue;  // nothing to read: 0
        for (double s : score) total += std::exp(s - top);
        for (size_t j = 0; j < M; ++j)
            if (score[j] > -INFINITY)
                for (size_t e = 0; e < E; ++e)
                    out[row * E + e] += std::exp(score[j] - top) / total * v[(group * M + j) * E + e];
    }

    auto n = [](size_t x) { return std::to_string(x); };
    std::string said = "{\"out\":{\"dtype\":\"F64\",\"shape\":[" + n(B) + "," + n(H) + "," + n(N) +
                       "," + n(E) + "],\"data_offsets\":[0," + n(8 * out.size()) + "]}}";
    said.resize((said.size() + 7) / 8 * 8, ' ');
    length = said.size();
    std::ofstream file(paths[2], std::ios::binary);
    file.write(reinterpret_cast<char*>(&length), 8).write(said.data(), length);
    file.write(reinterpret_cast<char*>(out.data()), 8 * out.size());
}
