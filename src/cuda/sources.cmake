# Writes OUTPUT: every file that NVRTC reads as text in the library, and a digest over all. usage:
#   cmake -DROOT=src -DOUTPUT=file.cc -P sources.cmake
file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/rules/*.h ${ROOT}/device/*.h ${ROOT}/device/*.cu)
list(SORT files)
set(all "")
set(table "")
foreach(file IN LISTS files)
  file(READ ${ROOT}/${file} text)
  string(SHA256 hash "${text}")
  string(APPEND all "${file} ${hash}\n")
  string(APPEND table "    {\"${file}\", R\"TESSERA(${text})TESSERA\"},\n")
endforeach()
string(SHA256 digest "${all}")
file(WRITE ${OUTPUT}.new "#include \"cuda/sources.h\"
namespace tessera::cuda {
namespace {
constexpr Source all[] = {
${table}};
}  // namespace
std::span<const Source> sources() {
  return all;
}
const char* source_digest() {
  return \"${digest}\";
}
}  // namespace tessera::cuda
")
file(COPY_FILE ${OUTPUT}.new ${OUTPUT} ONLY_IF_DIFFERENT)
