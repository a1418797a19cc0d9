# Sets AR_WITH_CUDA, and with it AR_GENCODE (nvcc options) and AR_CUDART_STATIC (path of libcudart_static.a).

set(AR_WITH_CUDA OFF)
if(AR_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(AR_WITH_CUDA ON)
  else()
    message(STATUS "no nvcc: the emulated backend alone")
  endif()
elseif(AR_CUDA)
  set(AR_WITH_CUDA ON)
endif()
if(NOT AR_WITH_CUDA)
  return()
endif()

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
# Only for the compiler check; targets get AR_GENCODE, which needs the toolkit's version.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 75)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 11.8)
  message(FATAL_ERROR "CUDA ${CMAKE_CUDA_COMPILER_VERSION} found, 11.8 or newer is needed (or AR_CUDA=OFF)")
endif()

set(ar_archs "${AR_CUDA_ARCHS}")
if(ar_archs STREQUAL "")
  set(ar_archs 75 80 86 89 90)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND ar_archs 100 120)
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0) # 13 dropped Pascal and Volta
    list(PREPEND ar_archs 60 61 70)
  endif()
endif()
string(REGEX REPLACE "[ ,;]+" ";" ar_archs "${ar_archs}")
list(SORT ar_archs COMPARE NATURAL)
# nvcc spends most of its time in the step from C++ to PTX, once for each virtual architecture: 8.6 and 8.9 take 8.0's.
set(AR_GENCODE "")
foreach(arch IN LISTS ar_archs)
  set(virtual ${arch})
  if(arch MATCHES "^8[67-9]$" AND "80" IN_LIST ar_archs)
    set(virtual 80)
  endif()
  list(APPEND AR_GENCODE "SHELL:-gencode arch=compute_${virtual},code=sm_${arch}")
endforeach()
list(GET ar_archs -1 ar_newest)
list(APPEND AR_GENCODE "SHELL:-gencode arch=compute_${ar_newest},code=compute_${ar_newest}")
list(JOIN ar_archs " " ar_text)
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${ar_text}, PTX ${ar_newest}")

find_library(AR_CUDART_STATIC cudart_static
  HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
        ${CMAKE_CUDA_COMPILER_LIBRARY_ROOT}/lib64 ${CMAKE_CUDA_COMPILER_LIBRARY_ROOT}/lib)
if(NOT AR_CUDART_STATIC)
  message(FATAL_ERROR "libcudart_static.a not found beside ${CMAKE_CUDA_COMPILER}")
endif()

# Exact IEEE results on every device: no contraction, no fast math. ptxas' register and spill report goes to a log.
function(ar_cuda_flags target)
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES OFF
    CUDA_COMPILER_LAUNCHER "sh;${PROJECT_SOURCE_DIR}/cmake/compile-log.sh;${PROJECT_BINARY_DIR}/ptxas-${target}.log")
  set_property(TARGET ${target} APPEND PROPERTY COMPILE_OPTIONS ${AR_GENCODE}
    --fmad=false -Xptxas=-v --threads=2 -Xfatbin=-compress-all
    -Xcompiler=-fvisibility=hidden -Xcompiler=-ffp-contract=off -Xcompiler=-Wall)
endfunction()
