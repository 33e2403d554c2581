fn main() -> anyhow::Result<()> {
    use eagle_verify::backend::cpu::*;
    let cpu = Cpu::new()?;
    let shapes:Vec<(usize,usize)>=(0..30).flat_map(|_|[(960,576),(576,576),(3072,576),(576,1536)]).chain([(49152,576)]).collect();
    let ls: Vec<PackedLinear> = shapes.iter().map(|&(n,k)| PackedLinear::new(&vec![0.01f32;n*k],n,k).unwrap()).collect();
    (|| for _ in 0..2 { for rows in [1usize,4,8,12,16,24,32] {
        let x=vec![0.5f32;rows*1536]; let mut y=vec![0f32;rows*49152];
        let mut per=[0f64;5];
        for it in 0..12 { if it==2 {per=[0.;5]} for (i,(l,&(n,k))) in ls.iter().zip(&shapes).enumerate() { let t=std::time::Instant::now(); l.forward(&cpu,&x[..rows*k],&mut y[..rows*n]).unwrap(); per[if i==120 {4} else {i%4}]+=t.elapsed().as_secs_f64()*100.; } }
        println!(" {rows}: {:.2?} {:.2}", per, per.iter().sum::<f64>()); } println!(); })();
    Ok(())
}
